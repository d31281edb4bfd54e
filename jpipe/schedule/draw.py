"""Pictures of a table: by ticks for a terminal, by simulated time for a figure.

rich and matplotlib are imported where they are used: whoever only builds schedules needs neither.
"""

import io
import itertools
import os
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jpipe.files import write_atomically
from jpipe.schedule.cells import cell_name, cell_number
from jpipe.schedule.phases import Phase, find_phases, find_pipeline_phases
from jpipe.schedule.simulate import CostModel, Simulation, simulate_schedule
from jpipe.schedule.table import Op, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.text import Text

# F is dark with light digits, B light with dark ones and W almost white, so they differ without
# colour as well. Odd microbatches are a shade lighter: the eye follows one through the stages.
_FILL = {
    Op.FORWARD: ("#2f5d8c", "#4b7fb3"),
    Op.BACKWARD: ("#f2ac57", "#f7c98f"),
    Op.WEIGHT: ("#cfe3c4", "#e2efdb"),
}
_INK = {Op.FORWARD: "#ffffff", Op.BACKWARD: "#3d2600", Op.WEIGHT: "#1f3d14"}
_LABEL = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.WEIGHT: "weight gradient"}
_SHADE = {Phase.WARM_UP: "#dfeaf5", Phase.STEADY: "#e6efdf", Phase.COOL_DOWN: "#efe7f3"}
_GREY = "#5f6670"
_SUFFIXES = (".png", ".svg")

# Inches; a row of the figure is one stage.
_ROW, _TOP, _BOTTOM, _LEFT, _RIGHT = 0.5, 0.8, 0.95, 0.85, 1.05


def draw_text(schedule: Schedule, *, width: int | None = None) -> "Text":
    """Draw a table for a terminal: a row for each stage, a column for each tick.

    `F3` is the forward of microbatch 3, `B3` its backward, and `W3` its weight gradient where that
    is an operation of its own; `F3.1` is that of chunk 1. The line above names the phases of the
    whole pipeline.

    Args:
        schedule: a table that `check_schedule` accepts.
        width: columns of the terminal; None for those of this one. A table that is wider loses
            ticks in its middle, and a line below says which.

    Raises:
        ValueError: if `width` leaves no room for the first and the last tick.
    """
    from rich.text import Text

    margin = len(f"stage {schedule.num_stages - 1}") + 1
    cell = 1 + max(len(cell_name(schedule, t, s) or "·") for t, s in np.ndindex(schedule.op.shape))
    narrowest = margin + 3 * cell
    if width is None:
        width = max(shutil.get_terminal_size().columns, narrowest)
    if width < narrowest:
        raise ValueError(f"width={width} must be at least {narrowest} for this table")

    # A tick, or None for those that do not fit.
    columns: list[int | None] = list(range(schedule.num_ticks))
    room = (width - margin) // cell
    hidden = range(0)
    if schedule.num_ticks > room:
        hidden = range(room // 2, schedule.num_ticks - (room - room // 2 - 1))
        columns[hidden.start : hidden.stop] = [None]

    lines = [Text(" " * margin + _phase_ruler(schedule, columns, cell), "dim")]
    lines.append(Text("tick".ljust(margin) + _tick_ruler(columns, cell), "dim"))
    for s in range(schedule.num_stages):
        line = Text(f"stage {s}".ljust(margin))
        for t in columns:
            if t is None or schedule.op[t, s] == Op.IDLE:
                line.append(("…" if t is None else "·").ljust(cell), "dim")
                continue
            op = Op(int(schedule.op[t, s]))
            fill = _FILL[op][schedule.microbatch[t, s] % 2]
            line.append(cell_name(schedule, t, s).ljust(cell - 1), f"bold {_INK[op]} on {fill}")
            line.append(" ")
        lines.append(line)
    if hidden:
        needed = margin + schedule.num_ticks * cell
        note = f"ticks {hidden[0]} to {hidden[-1]} are not shown: all need {needed} columns"
        lines.extend(Text(part, "dim") for part in textwrap.wrap(note, width))
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _phase_ruler(schedule: Schedule, columns: Sequence[int | None], cell: int) -> str:
    """A line with a bracket over the columns of each phase."""
    if not schedule.trains:
        return ""
    by_tick = find_pipeline_phases(schedule)
    by_column: list[Phase] = []
    for t in columns:
        # What does not fit counts as the column before it; the first tick always fits.
        by_column.append(by_column[-1] if t is None else Phase(int(by_tick[t])))
    brackets = []
    for phase, group in itertools.groupby(by_column):
        width = len(list(group)) * cell - 1
        if width >= len(phase.label) + 4:
            brackets.append("├" + f" {phase.label} ".center(width - 2, "─") + "┤")
        else:
            short = phase.label[: width - 1] + "…"
            names = (phase.label, phase.label.partition("-")[0], short)
            brackets.append(next(name for name in names if len(name) <= width).ljust(width))
    return " ".join(brackets)


def _tick_ruler(columns: Sequence[int | None], cell: int) -> str:
    """A line with the number of every fifth tick over its column."""
    line = ""
    for k, t in enumerate(columns):
        if t is not None and t % 5 == 0 and len(line) <= k * cell:
            line = line.ljust(k * cell) + f"{t} "
    return line[: len(columns) * cell].rstrip()


def save_figure(
    schedule: Schedule, path: str | os.PathLike[str], *, costs: CostModel | None = None
) -> None:
    """Draw a table on the axis of simulated time and save it.

    The file appears whole or not at all.

    Args:
        schedule: a table that `check_schedule` accepts.
        path: where to; ends in `.png` or `.svg`.
        costs: what operations and exchanges cost; None for a backward of two forwards and links
            that cost nothing.

    Raises:
        ValueError: if `path` ends otherwise, or the costs are for another number of stages.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"path={str(path)!r} must end in {' or '.join(_SUFFIXES)}")
    costs = costs or CostModel()
    image = _render(schedule, costs, path.suffix.lower()[1:])
    write_atomically(path, image)


def _render(schedule: Schedule, costs: CostModel, image_format: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The salt gives an SVG the same ids every time, so that a figure changes only with its table.
    with mpl.rc_context({"svg.hashsalt": "jpipe", "font.family": "DejaVu Sans"}):
        figure = Figure(dpi=150)
        FigureCanvasAgg(figure)
        _paint(figure, schedule, costs, simulate_schedule(schedule, costs))
        image = io.BytesIO()
        metadata = {"Date": None} if image_format == "svg" else None
        figure.savefig(image, format=image_format, metadata=metadata)
    return image.getvalue()


def _paint(figure: "Figure", schedule: Schedule, costs: CostModel, found: Simulation) -> None:
    """Lay out a figure: one row for each stage, as wide as the numbers need if that is bearable."""
    from matplotlib.patches import Patch

    num_stages = schedule.num_stages
    shortest = float(np.nanmin(found.end - found.start))
    digits = max(len(cell_number(schedule, t, s)) for t, s in np.argwhere(schedule.op != Op.IDLE))
    wish = (0.075 * digits + 0.05) * found.makespan / shortest
    across = float(np.clip(wish, 6.0, 18.0))
    width, height = _LEFT + across + _RIGHT, _TOP + num_stages * _ROW + _BOTTOM
    left, middle = _LEFT / width, (_LEFT + across / 2) / width
    figure.set_size_inches(width, height)
    axes = figure.add_axes((left, _BOTTOM / height, across / width, num_stages * _ROW / height))
    axes.set_xlim(0, found.makespan)
    axes.set_ylim(num_stages - 0.5, -0.5)
    inches = across / found.makespan
    _paint_phases(axes, schedule, found, inches)
    _paint_operations(axes, schedule, found, inches)

    axes.set_yticks(range(num_stages), [f"stage {s}" for s in range(num_stages)])
    axes.tick_params(left=False, labelsize=9, colors=_GREY)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_GREY)
    axes.set_xlabel(f"time ({_describe(schedule, costs)})", fontsize=9, color=_GREY)

    what = "microbatches" if schedule.num_chunks == 1 else "microbatches\nof a chunk"
    kept = [f"{what}\nkept at most", *map(str, found.peak_kept.tolist())]
    for text, row in zip(kept, [-0.5 - 0.22 / _ROW, *range(num_stages)], strict=True):
        x = found.makespan + _RIGHT / 2 / inches
        axes.text(x, row, text, ha="center", va="center", fontsize=9, color=_GREY)
    for text, inch, size, weight in (
        (schedule.name, 0.27, 13, "bold"),
        (
            f"stages P = {num_stages},   microbatches M = {schedule.num_microbatches},   "
            f"bubble {found.bubble:.1%}",
            0.55,
            10,
            "normal",
        ),
    ):
        figure.text(left, 1 - inch / height, text, fontsize=size, weight=weight, va="center")
    present = [p for p in Phase if (find_phases(schedule) == p).any() and schedule.trains]
    handles = [
        Patch(color=fills[0], label=_LABEL[op])
        for op, fills in _FILL.items()
        if (schedule.op == op).any()
    ]
    handles += [Patch(color=_SHADE[phase], label=phase.label) for phase in present]
    figure.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(middle, 0.08 / height),
        ncols=len(handles),
        fontsize=9,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.6,
    )


def _paint_phases(axes: "Axes", schedule: Schedule, found: Simulation, inches: float) -> None:
    """Shade the row of each stage by its phases, and label those that have the room."""
    phases = find_phases(schedule)
    for s in range(schedule.num_stages):
        # A phase ends where the first operation of the next one starts, so that waits belong to
        # the phase they hold up.
        present = [p for p in Phase if (phases[:, s] == p).any()]
        starts = [float(np.nanmin(found.start[phases[:, s] == p, s])) for p in present[1:]]
        edges = [0.0, *starts, found.makespan]
        for phase, (left, right) in zip(present, itertools.pairwise(edges), strict=True):
            axes.barh(s, right - left, 0.94, left, color=_SHADE[phase], zorder=0)
            if schedule.trains and (right - left) * inches > 0.055 * len(phase.label) + 0.06:
                axes.text(
                    (left + right) / 2,
                    s + 0.345,
                    phase.label,
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color=_GREY,
                )


def _paint_operations(axes: "Axes", schedule: Schedule, found: Simulation, inches: float) -> None:
    """Draw a box for each operation, with its microbatch if every number of its kind fits."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    length = found.end - found.start
    for op, fills in _FILL.items():
        cells = np.argwhere(schedule.op == op).tolist()
        if not cells:
            continue
        boxes = [Rectangle((found.start[t, s], s - 0.41), length[t, s], 0.62) for t, s in cells]
        narrowest = inches * min(length[t, s] for t, s in cells)
        axes.add_collection(
            PatchCollection(
                boxes,
                facecolors=[fills[schedule.microbatch[t, s] % 2] for t, s in cells],
                edgecolors="white",
                linewidths=0.6 if narrowest > 0.06 else 0.2,
                zorder=1,
            )
        )
        # A digit is 0.64 of the size of its font wide, and a point is 1/72 inch.
        digits = max(len(cell_number(schedule, t, s)) for t, s in cells)
        size = min(9.0, 72 * narrowest / (0.64 * digits + 0.4))
        for t, s in cells if size >= 4.5 else []:
            axes.text(
                found.start[t, s] + length[t, s] / 2,
                s - 0.1,
                cell_number(schedule, t, s),
                ha="center",
                va="center_baseline",
                fontsize=size,
                color=_INK[op],
            )


def _describe(schedule: Schedule, costs: CostModel) -> str:
    """The costs in a few words."""
    parts = []
    split = np.asarray(costs.backward, float) * costs.weight
    operations: list[tuple[str, Any]] = [("F", costs.forward), ("B", costs.backward)]
    if schedule.splits_backward:
        operations[1:] = [("B", costs.backward - split), ("W", split)]
    for name, cost in (*operations, ("exchange", costs.link)):
        values = np.unique(np.asarray(cost, float))
        low, high = f"{values[0]:g}", f"{values[-1]:g}"
        parts.append(f"{name} = {low}" if low == high else f"{name} = {low} to {high}")
    of = f" of all {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    return ", ".join(parts) + of
