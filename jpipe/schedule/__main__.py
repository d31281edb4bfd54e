"""The schedule viewer: `python -m jpipe.schedule --stages 4 --microbatches 8`."""

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from jpipe.cli import Parser, argument, number, refuse, whole_number
from jpipe.schedule.cells import write_schedule
from jpipe.schedule.check import check_schedule
from jpipe.schedule.draw import draw_text, save_figure
from jpipe.schedule.registry import CHUNKED, SCHEDULES, load_schedule, schedule_named
from jpipe.schedule.simulate import CostModel, Simulation, simulate_schedule
from jpipe.schedule.table import Schedule

if TYPE_CHECKING:
    from rich.table import Table


def main(argv: Sequence[str] | None = None) -> int:
    """Show a schedule, or compare all.

    Args:
        argv: the arguments; None for those of the process.

    Returns:
        The exit status: 0, or 2 for bad input, which one message on stderr explains.
    """
    try:
        _run(_parser().parse_args(argv))
    except ValueError as error:
        return refuse(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m jpipe.schedule",
        description="Check a pipeline schedule, show it, and say what it costs.",
        allow_abbrev=False,
    )
    positive, not_negative = number(above=True), number(above=False)
    parser.add_argument("--stages", type=whole_number(1), required=True, metavar="P")
    parser.add_argument("--microbatches", type=whole_number(1), required=True, metavar="M")
    parser.add_argument(
        "--schedule",
        type=argument(lambda text: text if text == "all" else schedule_named(text)),
        default="1f1b",
        metavar="NAME",
        help=f"{', '.join(SCHEDULES)}, or a .csv file with a table; all compares them; "
        "default: 1f1b",
    )
    parser.add_argument(
        "--chunks",
        type=whole_number(1),
        metavar="V",
        help=f"chunks of the model on each stage; default: 2 for {' and '.join(CHUNKED)}, else 1",
    )
    parser.add_argument(
        "--forward-cost",
        type=positive,
        default=1.0,
        metavar="TIME",
        help="time of the forward of a stage, in any unit; default: 1",
    )
    parser.add_argument(
        "--backward-cost",
        type=positive,
        default=2.0,
        metavar="TIME",
        help="time of its backward; default: 2",
    )
    parser.add_argument(
        "--link-cost",
        type=not_negative,
        default=0.0,
        metavar="TIME",
        help="time of an exchange between neighbours; default: 0",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="save a figure as .png or .svg, or the table as .csv, of one schedule",
    )
    return parser


def _run(args: argparse.Namespace) -> None:
    from rich.console import Console

    if args.schedule == "all" and args.out is not None:
        raise ValueError(
            f"argument --out: {args.out!r} needs one schedule; "
            f"choose one with --schedule {{{','.join(SCHEDULES)}}}"
        )
    if args.schedule == "all" and args.chunks is not None:
        raise ValueError(
            f"argument --chunks: {args.chunks} needs --schedule {' or '.join(CHUNKED)}; all "
            "compares them with 2"
        )
    costs = CostModel(args.forward_cost, args.backward_cost, args.link_cost)
    names = list(SCHEDULES) if args.schedule == "all" else [args.schedule]
    schedules = [load_schedule(name, args.stages, args.microbatches, args.chunks) for name in names]
    for schedule in schedules:
        check_schedule(schedule)
    if args.out is not None:
        try:
            if args.out.endswith(".csv"):
                write_schedule(schedules[0], args.out)
            else:
                save_figure(schedules[0], args.out, costs=costs)
        except ValueError as error:
            raise ValueError(f"argument --out: {error}") from error
        except OSError as error:
            raise ValueError(
                f"argument --out: cannot write {args.out!r} ({error.strerror}); "
                "choose a folder that exists and may be written"
            ) from error
    console = Console()
    if len(schedules) == 1:
        console.print(draw_text(schedules[0]), no_wrap=True, overflow="crop")
        console.print()
    found = [simulate_schedule(schedule, costs) for schedule in schedules]
    console.print(_summary(schedules, found, args.forward_cost))
    if args.out is not None:
        console.print(f"saved {args.out}", highlight=False, markup=False, soft_wrap=True)


def _summary(
    schedules: Sequence[Schedule], found: Sequence[Simulation], forward_cost: float
) -> "Table":
    """A table with a column for each schedule; times in forwards."""
    from rich.table import Table

    table = Table("", *(schedule.name for schedule in schedules))
    rows: dict[str, Callable[[Schedule, Simulation], str]] = {
        "ticks": lambda schedule, _: str(schedule.num_ticks),
        "makespan, in forwards": lambda _, sim: f"{sim.makespan / forward_cost:g}",
        "bubble": lambda _, sim: f"{sim.bubble:.1%}",
        "idle by stage, in forwards": lambda _, sim: _by_stage(sim.idle / forward_cost),
        "kept at most, by stage": lambda schedule, sim: (
            _by_stage(sim.peak_kept) + (" chunks" if schedule.num_chunks > 1 else "")
        ),
    }
    for label, show in rows.items():
        table.add_row(label, *(show(*pair) for pair in zip(schedules, found, strict=True)))
    return table


def _by_stage(values: NDArray[Any]) -> str:
    return " ".join(f"{value:g}" for value in values.tolist())


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A pipe whose encoding lacks the signs of the picture gets question marks, no traceback.
        sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
