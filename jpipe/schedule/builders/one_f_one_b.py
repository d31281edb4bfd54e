"""1F1B: one forward, one backward, so that a stage keeps few microbatches.

Narayanan et al., "PipeDream", 2019, in the synchronous form of "Memory-Efficient
Pipeline-Parallel DNN Training", 2021 (arXiv 2006.09503). Where we differ: only the pairs of
neighbours that have something for each other meet in a tick, so that a stage never waits for
anybody else and the one program on all devices keeps the ideal time.
"""

from jpipe.schedule.table import Schedule, from_ticks


def one_f_one_b_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the 1F1B table with hop 1.

    F(i) of stage s runs in tick `2i + s`, B(j) in tick `2j + 2P - 1 - s`. F and B alternate by
    the parity of the tick, and stage s keeps at most `P - s` microbatches. After tick t the pairs
    (s, s + 1) whose s has the parity of t exchange, both ways at once: what an F made goes up,
    what a B made goes down.

    Args:
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.

    Raises:
        ValueError: if an argument is below 1.
    """

    def pairs(parity: int) -> tuple[tuple[int, int], ...]:
        lower = range(parity, num_stages - 1, 2)
        return tuple(edge for s in lower for edge in ((s, s + 1), (s + 1, s)))

    return from_ticks(
        "1f1b",
        num_stages,
        num_microbatches,
        forward_tick=lambda i, s: 2 * i + s,
        backward_tick=lambda j, s: 2 * j + 2 * num_stages - 1 - s,
        hop=1,
        routes=(pairs(0), pairs(1)),
        route_of_tick=lambda t: t % 2,
    )
