"""GPipe: every forward, then every backward.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
2019 (arXiv 1811.06965). The simplest schedule and the yardstick for the others: it takes as long
as 1F1B, and each stage keeps all M microbatches.
"""

from jpipe.schedule.table import Schedule, chain, from_ticks


def gpipe_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the GPipe table.

    F(i) of stage s runs in tick `i + s`, B(j) in tick `(M + P - 1) + (P - 1 - s) + j`. Activations
    move up the chain in the first half, gradients down it in the second.

    Args:
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.

    Raises:
        ValueError: if an argument is below 1.
    """
    half = num_microbatches + num_stages - 1
    return from_ticks(
        "gpipe",
        num_stages,
        num_microbatches,
        forward_tick=lambda i, s: i + s,
        backward_tick=lambda j, s: half + (num_stages - 1 - s) + j,
        hop=1,
        routes=(chain(num_stages, up=True), chain(num_stages, up=False)),
        route_of_tick=lambda t: int(t >= half),
    )
