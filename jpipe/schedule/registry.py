"""The training schedules by the names users type."""

from collections.abc import Callable

from jpipe.schedule.builders import (
    gpipe_schedule,
    one_f_one_b_overlap_schedule,
    one_f_one_b_schedule,
)
from jpipe.schedule.table import Schedule

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe_schedule,
    "1f1b": one_f_one_b_schedule,
    "1f1b-overlap": one_f_one_b_overlap_schedule,
}
"""Builders `(num_stages, num_microbatches) -> Schedule` by name."""


def make_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Build a training schedule by name.

    Args:
        name: one of `SCHEDULES`.
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.

    Raises:
        ValueError: if the name is unknown or a number is below 1.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name](num_stages, num_microbatches)
