"""Interleaved 1F1B: several chunks of the model on each stage, for a smaller bubble.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
2021 (arXiv 2104.04473): with V chunks the bubble is V times smaller, (P - 1)(F + B) / V, and
stage s keeps up to V P + P - 1 - 2s microbatches of a chunk.

The table is that of `1f1b-overlap`, round a ring: forwards in even ticks, backwards in odd ones,
and every exchange beside an operation. So the link from the last stage back to the first has as
much time as any other, and no stage waits there. Where we differ: M need not be a multiple of P.
The microbatches that are left over make the rounds longer, and wait in an inbox.
"""

from jpipe.schedule.builders.rounds import make_rounds
from jpipe.schedule.table import Schedule, chain, check_counts, from_ticks


def interleaved_schedule(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Build the interleaved table with hop 2.

    Args:
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.
        num_chunks: V, at least 1; with 1 it is `1f1b-overlap`.

    Raises:
        ValueError: if an argument is below 1.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    place = make_rounds(num_stages, num_microbatches)
    # The last virtual stage turns round in the pair of ticks in which it runs the forward.
    turn = num_stages - 1 + (num_chunks - 1) * max(own.width for own in place)

    def forward_tick(i: int, v: int) -> int:
        c, s = divmod(v, num_stages)
        return 2 * (s + place[i].nth(c, num_chunks))

    def backward_tick(i: int, v: int) -> int:
        c, s = divmod(v, num_stages)
        nth = place[i].nth(num_chunks - 1 - c, num_chunks)
        return 2 * (turn + num_stages - 1 - s + nth) + 1

    ring = num_chunks > 1
    return from_ticks(
        "interleaved",
        num_stages,
        num_microbatches,
        forward_tick=forward_tick,
        backward_tick=backward_tick,
        hop=2,
        routes=(chain(num_stages, up=True, ring=ring), chain(num_stages, up=False, ring=ring)),
        route_of_tick=lambda t: t % 2,
        num_chunks=num_chunks,
    )
