"""Forwards alone, for evaluation and prediction."""

from jpipe.schedule.builders.rounds import make_rounds
from jpipe.schedule.table import Schedule, chain, check_counts, from_ticks


def forward_only_schedule(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Build a table without backwards: F(i) of stage s runs in tick `i + s`.

    Args:
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.
        num_chunks: V, at least 1; above 1 a stage takes the chunks in turn, see `interleaved`.

    Raises:
        ValueError: if an argument is below 1.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    place = make_rounds(num_stages, num_microbatches)

    def forward_tick(i: int, v: int) -> int:
        c, s = divmod(v, num_stages)
        return s + place[i].nth(c, num_chunks)

    return from_ticks(
        "forward-only",
        num_stages,
        num_microbatches,
        forward_tick=forward_tick,
        backward_tick=None,
        hop=1,
        routes=(chain(num_stages, up=True, ring=num_chunks > 1),),
        route_of_tick=lambda t: 0,
        num_chunks=num_chunks,
    )
