"""1F1B with its communication hidden: an exchange has one operation's time to finish.

The table is ours. It spends memory, `2(P - s) - 1` microbatches on stage s instead of `P - s`, to
let every exchange run beside the next operation.
"""

from jpipe.schedule.table import Schedule, chain, from_ticks


def one_f_one_b_overlap_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the 1F1B table with hop 2.

    Even ticks hold forwards, odd ticks backwards: F(i) of stage s runs in tick `2(s + i)`, B(j) in
    tick `2(2(P - 1) - s + j) + 1`. What a forward made moves up while the backwards run, and what
    a backward made moves down while the forwards run.

    Args:
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.

    Raises:
        ValueError: if an argument is below 1.
    """
    return from_ticks(
        "1f1b-overlap",
        num_stages,
        num_microbatches,
        forward_tick=lambda i, s: 2 * (s + i),
        backward_tick=lambda j, s: 2 * (2 * (num_stages - 1) - s + j) + 1,
        hop=2,
        routes=(chain(num_stages, up=True), chain(num_stages, up=False)),
        route_of_tick=lambda t: t % 2,
    )
