"""Forwards alone, for evaluation and prediction."""

from jpipe.schedule.table import Schedule, chain, from_ticks


def forward_only_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Build a table without backwards: F(i) of stage s runs in tick `i + s`.

    Args:
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.

    Raises:
        ValueError: if an argument is below 1.
    """
    return from_ticks(
        "forward-only",
        num_stages,
        num_microbatches,
        forward_tick=lambda i, s: i + s,
        backward_tick=None,
        hop=1,
        routes=(chain(num_stages, up=True),),
        route_of_tick=lambda t: 0,
    )
