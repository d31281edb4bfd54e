"""A table as its users write it: a row for each stage, a column for each tick.

`F3` is the forward of microbatch 3, `B3` its backward and `W3` its weight gradient; with several
chunks `F3.1` is that of chunk 1. An idle tick is empty, or one of the signs `.`, `-` and `·`. So
pictures show it, and so files hold it, with commas between ticks. A file may begin with the lines
`hop,2` and `folded`, see `Schedule`; without them the hop is 1, and all chunks go the same way.
"""

import csv
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

from jpipe.files import write_atomically
from jpipe.schedule.check import check_schedule
from jpipe.schedule.table import Cell, Op, Schedule, from_cells

_IDLE = {"", ".", "-", Op.IDLE.letter}
_CELL = re.compile(r"([FBW])(\d{1,9})(?:\.(\d{1,9}))?")
_HOP, _FOLDED = "hop", "folded"


def schedule_from_cells(
    rows: Sequence[Sequence[str]], name: str = "custom", *, hop: int = 1, folded: bool = False
) -> Schedule:
    """The schedule that a table of cells describes, proved right.

    What a tick makes leaves over the exchanges that its tick needs, and waits at its destination
    until it is used.

    Args:
        rows: a sequence, or an array, of cells for each stage. Shorter rows end in idle ticks.
        name: what to call it.
        hop: least ticks between making a tensor and the neighbour's use of it, 1 or 2.
        folded: whether every other chunk goes back over the stages.

    Raises:
        ValueError: if a cell cannot be read, which is named by stage and tick, or the table is
            wrong, see `check_schedule`.
    """
    cells: dict[tuple[int, int], Cell] = {}
    for s, row in enumerate(rows):
        for t, text in enumerate(row):
            text = str(text).strip()
            if text in _IDLE:
                continue
            found = _CELL.fullmatch(text)
            if found is None:
                raise ValueError(
                    f"schedule {name!r}: {text!r} at stage {s}, tick {t} is no operation; write F, "
                    "B or W and a microbatch, as in F3, and a chunk where there are several, as in "
                    "F3.1; leave idle ticks empty"
                )
            op = next(op for op in Op if op.letter == found[1])
            cells[t, s] = op, int(found[2]), int(found[3] or 0)
    if not cells:
        raise ValueError(
            f"schedule {name!r} holds no operation; give a row of cells for each stage"
        )
    num_microbatches, num_chunks = (1 + max(c[k] for c in cells.values()) for k in (1, 2))
    if num_microbatches * num_chunks * len(rows) > len(cells):
        raise ValueError(
            f"schedule {name!r} names microbatch {num_microbatches - 1} and chunk "
            f"{num_chunks - 1}, but has {len(cells)} operations; each chunk of each of the "
            f"{len(rows)} stages must run each microbatch"
        )
    schedule = from_cells(
        name, len(rows), num_microbatches, cells, hop=hop, num_chunks=num_chunks, folded=folded
    )
    check_schedule(schedule)
    return schedule


def schedule_to_cells(schedule: Schedule) -> list[list[str]]:
    """The cells of a table: a row for each stage, the empty string where it idles."""
    return [
        [cell_name(schedule, t, s) for t in range(schedule.num_ticks)]
        for s in range(schedule.num_stages)
    ]


def cell_name(schedule: Schedule, tick: int, stage: int) -> str:
    """What a cell is called; empty where the stage idles."""
    op = Op(int(schedule.op[tick, stage]))
    return "" if op == Op.IDLE else op.letter + cell_number(schedule, tick, stage)


def cell_number(schedule: Schedule, tick: int, stage: int) -> str:
    """The microbatch of a cell, and the chunk if a stage has several."""
    chunk = f".{schedule.chunk[tick, stage]}" if schedule.num_chunks > 1 else ""
    return f"{schedule.microbatch[tick, stage]}{chunk}"


def read_schedule(path: str | os.PathLike[str]) -> Schedule:
    """Read a table from a file of comma-separated cells, a line for each stage.

    Raises:
        ValueError: if the file cannot be read, or as `schedule_from_cells`.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text)) if any(map(str.strip, row))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no table in UTF-8"
        raise ValueError(
            f"cannot read the schedule {str(path)!r}: {reason}; give a .csv file of cells such as "
            "F0, a line for each stage"
        ) from error
    hop = 1
    if rows and rows[0][0].strip() == _HOP:
        (_, *values), *rows = rows
        given = "".join(values).strip()
        if given not in ("1", "2"):
            raise ValueError(f"schedule {path.name!r}: hop,{given} must be hop,1 or hop,2")
        hop = int(given)
    folded = bool(rows) and [cell.strip() for cell in rows[0] if cell.strip()] == [_FOLDED]
    return schedule_from_cells(rows[folded:], path.name, hop=hop, folded=folded)


def write_schedule(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a table to a file that `read_schedule` reads. It appears whole or not at all.

    Raises:
        OSError: if the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if schedule.hop != 1:
        writer.writerow([_HOP, schedule.hop])
    if schedule.folded:
        writer.writerow([_FOLDED])
    writer.writerows(schedule_to_cells(schedule))
    write_atomically(Path(path), text.getvalue().encode())
