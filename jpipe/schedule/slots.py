"""Which slot of a buffer each microbatch occupies while a stage keeps it.

A stage keeps something from F(i) until B(i). Two microbatches kept at the same time need two
slots; one that comes later takes the slot of one that is done. For 1F1B this gives a ring.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from jpipe.schedule.table import Op, Schedule


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """The slot that each operation writes (F) or reads (B).

    Attributes:
        slot: int32 `[ticks, stages]`; -1 where the stage idles.
        per_stage: int32 `[stages]`, how many slots each stage uses: the most microbatches it ever
            keeps.
    """

    slot: NDArray[np.int32]
    per_stage: NDArray[np.int32]


def assign_slots(schedule: Schedule) -> Slots:
    """Give each kept microbatch the lowest slot that is free, stage by stage.

    A slot is taken from its forward to the end of its backward; without a backward nothing is
    kept, so forwards of such a table use slot 0. Greedy assignment in order of time is optimal for
    intervals: it uses exactly as many slots as are ever needed at once.
    """
    slot = np.full(schedule.op.shape, -1, np.int32)
    per_stage = np.zeros(schedule.num_stages, np.int32)
    keeps = bool((schedule.op == Op.BACKWARD).any())
    for s in range(schedule.num_stages):
        taken: dict[tuple[int, int], int] = {}
        for t in range(schedule.num_ticks):
            if schedule.op[t, s] == Op.IDLE:
                continue
            key = (int(schedule.microbatch[t, s]), int(schedule.chunk[t, s]))
            if schedule.op[t, s] == Op.FORWARD:
                free = min(set(range(len(taken) + 1)) - set(taken.values()))
                slot[t, s] = free
                per_stage[s] = max(per_stage[s], free + 1)
                if keeps:
                    taken[key] = free
            else:
                slot[t, s] = taken.pop(key)
    return Slots(slot, per_stage)
