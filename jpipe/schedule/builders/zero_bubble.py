"""Zero bubble, in its form with the memory of 1F1B: weight gradients fill what 1F1B leaves idle.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), ZB-H1. A backward makes the
gradient of the input alone, which the previous stage waits for. The gradient of the parameters,
which nobody waits for, is an operation of its own, W. The bubble is (P - 1)(F + B - W).

Stages meet only if one has something for the other, and the time is ideal also if B takes longer
than F and W, as it does with recomputation. (A W that takes less than F fills less: with W = 0.7 F
it is up to 8% more.)
"""

from jpipe.schedule.table import Cell, Op, Schedule, check_counts, from_cells


def zero_bubble_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the ZB-H1 table with hop 1.

    Every stage runs, in each tick, the first of these that it can: the next forward, if it has
    fewer than P - s microbatches between forward and backward and fewer than P between forward and
    weight gradient; the next backward; the next weight gradient. So it keeps P microbatches at
    most. With M of at least P, F = W and B of at least F, it takes the ideal time,
    M(F + B + W) + (P - 1)(F + B - W).

    Args:
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.

    Raises:
        ValueError: if an argument is below 1.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    cells: dict[tuple[int, int], Cell] = {}
    done = {op: [0] * num_stages for op in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)}
    t = 0
    while min(done[Op.WEIGHT]) < num_microbatches:
        chosen = [_choose(done, s, num_stages, num_microbatches) for s in range(num_stages)]
        for s, op in enumerate(chosen):
            if op is not None:
                cells[t, s] = op, done[op][s], 0
                done[op][s] += 1
        t += 1
    return from_cells("zero-bubble", num_stages, num_microbatches, cells)


def _choose(done: dict[Op, list[int]], s: int, num_stages: int, num_microbatches: int) -> Op | None:
    """What a stage runs next, given how many operations of each kind each stage has done."""
    forward, backward, weight = (done[op][s] for op in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT))
    first, last = s == 0, s == num_stages - 1
    entered = num_microbatches if first else done[Op.FORWARD][s - 1]
    returned = forward if last else done[Op.BACKWARD][s + 1]
    room = forward - backward < num_stages - s and forward - weight < num_stages
    if forward < entered and room:
        return Op.FORWARD
    if backward < min(forward, returned):
        return Op.BACKWARD
    return Op.WEIGHT if weight < backward else None
