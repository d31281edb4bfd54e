"""Zero bubble with two chunks on each stage, the second on the way back: V-shaped.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), ZB-V. The first stage has
the first piece of the model and the last, the last stage the two in the middle. So a backward
begins where its forward ended at once, and stages fill and drain twice as fast: with operations
that take the same time the bubble is half that of ZB-H1, with the memory of 1F1B.

All neighbours exchange in every tick. They meet in any case where all operations take as long, and
the program knows every exchange when it is compiled.
"""

import dataclasses

from jpipe.schedule.builders.zero_bubble import zero_bubble_schedule
from jpipe.schedule.table import Cell, Op, Schedule, chain, check_counts, from_cells

NAME = "zero-bubble-v"


def zero_bubble_v_schedule(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Build the ZB-V table with hop 1.

    A stage runs, in each tick, the first of these that it can: a forward, of chunk 1 before chunk
    0, if it has fewer than 2P of the chunks of microbatches between forward and weight gradient; a
    backward, of chunk 0 before chunk 1; a weight gradient. With operations that take the same time
    T (F, B and W of one chunk), it takes 6MT + (P - 1)T if M is P or at least 3P/2; in between up
    to (P - 2)T more.

    Args:
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.
        num_chunks: 2; or 1, with which it is `zero-bubble`.

    Raises:
        ValueError: if an argument is below 1, or there are more chunks.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    if num_chunks == 1:
        return dataclasses.replace(zero_bubble_schedule(num_stages, num_microbatches), name=NAME)
    if num_chunks != 2:
        raise ValueError(
            f"schedule={NAME!r} runs two chunks of the model on a stage, not num_chunks="
            f"{num_chunks}; choose interleaved for more"
        )
    cells: dict[tuple[int, int], Cell] = {}
    done = {op: [0] * (2 * num_stages) for op in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)}
    t = 0
    while min(done[Op.WEIGHT]) < num_microbatches:
        chosen = [_choose(done, s, num_stages, num_microbatches) for s in range(num_stages)]
        for s, choice in enumerate(chosen):
            if choice is not None:
                op, v = choice
                cells[t, s] = op, done[op][v], v // num_stages
                done[op][v] += 1
        t += 1
    both = chain(num_stages, up=True) + chain(num_stages, up=False)
    turn = ((num_stages - 1, num_stages - 1),)
    return from_cells(
        NAME,
        num_stages,
        num_microbatches,
        cells,
        num_chunks=2,
        folded=True,
        routes=(both + turn,),
    )


def _choose(
    done: dict[Op, list[int]], s: int, num_stages: int, num_microbatches: int
) -> tuple[Op, int] | None:
    """What a stage runs next, and of which virtual stage, given how many of each are done."""
    forward, backward, weight = (done[op] for op in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT))
    last = 2 * num_stages - 1
    down, back = s, last - s
    entered = [num_microbatches, *forward]
    returned = [*backward[1:], forward[last]]
    room = sum(forward[v] - weight[v] for v in (down, back)) < 2 * num_stages
    for v in (back, down):
        if room and forward[v] < entered[v]:
            return Op.FORWARD, v
    for v in (down, back):
        if backward[v] < min(forward[v], returned[v]):
            return Op.BACKWARD, v
    for v in (down, back):
        if weight[v] < backward[v]:
            return Op.WEIGHT, v
    return None
