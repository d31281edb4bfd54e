"""The training schedules by the names users type."""

from collections.abc import Callable

from jpipe.schedule.builders import (
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_overlap_schedule,
    one_f_one_b_schedule,
    zero_bubble_overlap_schedule,
    zero_bubble_schedule,
    zero_bubble_v_schedule,
)
from jpipe.schedule.cells import read_schedule
from jpipe.schedule.table import Schedule

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe_schedule,
    "1f1b": one_f_one_b_schedule,
    "1f1b-overlap": one_f_one_b_overlap_schedule,
    "interleaved": interleaved_schedule,
    "zero-bubble": zero_bubble_schedule,
    "zero-bubble-overlap": zero_bubble_overlap_schedule,
    "zero-bubble-v": zero_bubble_v_schedule,
}
"""Builders `(num_stages, num_microbatches) -> Schedule` by name."""

CHUNKED: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved": interleaved_schedule,
    "zero-bubble-v": zero_bubble_v_schedule,
}
"""Of these the builders that also take a number of chunks."""


def schedule_named(text: str) -> str:
    """The name of a schedule or of a file with a table, as a command line gives it.

    Raises:
        ValueError: if it is neither.
    """
    if text not in SCHEDULES and not text.endswith(".csv"):
        raise ValueError(
            f"{text!r} is unknown; choose {', '.join(SCHEDULES)}, or a .csv file with a table"
        )
    return text


def load_schedule(
    text: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """The schedule that a command line names: one of `SCHEDULES`, or a file with a table.

    Args:
        text: the name, or the path of a `.csv` file.
        num_stages: P.
        num_microbatches: M.
        num_chunks: V; None for 2 of those in `CHUNKED`, 1 of others, and what a file has.

    Raises:
        ValueError: as `make_schedule` and `read_schedule`, or if a file's table is for other
            numbers.
    """
    if not text.endswith(".csv"):
        default = 2 if text in CHUNKED else 1
        return make_schedule(text, num_stages, num_microbatches, num_chunks or default)
    schedule = read_schedule(text)
    asked = {"stages": num_stages, "microbatches": num_microbatches, "chunks": num_chunks}
    for what, number in asked.items():
        found = getattr(schedule, f"num_{what}")
        if number not in (None, found):
            raise ValueError(
                f"the table in {text!r} is for {found} {what}, not {number}; ask for {found}, or "
                "give another table"
            )
    return schedule


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """Build a training schedule by name.

    Args:
        name: one of `SCHEDULES`.
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.
        num_chunks: V, model chunks per stage, at least 1; above 1 only for those in `CHUNKED`.

    Raises:
        ValueError: if the name is unknown, a number is below 1, or the schedule cannot have so many
            chunks.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if name in CHUNKED:
        return CHUNKED[name](num_stages, num_microbatches, num_chunks)
    if num_chunks != 1:
        raise ValueError(
            f"schedule={name!r} runs one chunk of the model on a stage, not num_chunks="
            f"{num_chunks}; choose {' or '.join(CHUNKED)}"
        )
    return SCHEDULES[name](num_stages, num_microbatches)
