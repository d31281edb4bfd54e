"""Zero bubble with its communication hidden: every exchange has an operation's time to finish.

The table is ours: that of `1f1b-overlap` with the backward cut in two, as in Qi et al., "Zero
Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241). Its bubble is at most (P - 1)(F + B), between
those of `1f1b` and `zero-bubble`, and it keeps as much as `1f1b-overlap`.
"""

from jpipe.schedule.table import Schedule, chain, from_ticks


def zero_bubble_overlap_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the table with hop 2, in which forwards, backwards and weight gradients take turns.

    F(i) of stage s runs in tick `3(s + i)`, B(j) in tick `3(2(P - 1) - s + j) + 1`, and W(j), on
    all stages, in tick `3(2(P - 1) + j) + 2`, so that none delays the backwards that others wait
    for. What a forward made moves up while backwards run, and what a backward made moves down while
    weight gradients do. Stage s keeps at most `2P - 1 - s` microbatches.

    Args:
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.

    Raises:
        ValueError: if an argument is below 1.
    """
    turn = 2 * (num_stages - 1)
    return from_ticks(
        "zero-bubble-overlap",
        num_stages,
        num_microbatches,
        forward_tick=lambda i, s: 3 * (s + i),
        backward_tick=lambda j, s: 3 * (turn - s + j) + 1,
        weight_tick=lambda j, s: 3 * (turn + j) + 2,
        hop=2,
        routes=(chain(num_stages, up=True), chain(num_stages, up=False), ()),
        route_of_tick=lambda t: t % 3,
    )
