"""Which slot of a buffer each microbatch occupies while a stage keeps something of it.

Two microbatches kept at the same time need two slots; one that comes later takes the slot of one
that is done. For 1F1B this gives a ring.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from jpipe.schedule.table import Op, Schedule, lanes


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """The slot that each operation writes or reads.

    Attributes:
        slot: int32 `[ticks, stages]`; -1 where an operation has none, as where the stage idles.
        per_stage: int32 `[stages]`, how many slots each stage uses: the most microbatches it ever
            keeps.
    """

    slot: NDArray[np.int32]
    per_stage: NDArray[np.int32]


def assign_slots(schedule: Schedule) -> Slots:
    """Slots for what is kept from a forward to the last that needs it, backward or weight gradient.

    Without a backward nothing is kept, so forwards of such a table use slot 0.
    """
    if not schedule.trains:
        slot = np.where(schedule.op == Op.FORWARD, 0, -1).astype(np.int32)
        return Slots(slot, slot.max(axis=0) + 1)
    return _from_to(schedule, Op.FORWARD, Op.WEIGHT if schedule.splits_backward else Op.BACKWARD)


def assign_weight_slots(schedule: Schedule) -> Slots:
    """Slots for what is kept from a backward to its weight gradient; none if they are not split."""
    if not schedule.splits_backward:
        none = np.full(schedule.op.shape, -1, np.int32)
        return Slots(none, np.zeros(schedule.num_stages, np.int32))
    return _from_to(schedule, Op.BACKWARD, Op.WEIGHT)


def _from_to(schedule: Schedule, opens: Op, closes: Op) -> Slots:
    """A slot for each microbatch and chunk from one kind of operation to the end of another."""
    slot = np.full(schedule.op.shape, -1, np.int32)
    per_stage = np.zeros(schedule.num_stages, np.int32)
    for s in range(schedule.num_stages):
        taken: dict[tuple[int, int], int] = {}
        for t in range(schedule.num_ticks):
            key = (int(schedule.microbatch[t, s]), int(schedule.chunk[t, s]))
            op = schedule.op[t, s]
            if op == opens:
                taken[key] = lowest_free(taken.values())
                per_stage[s] = max(per_stage[s], taken[key] + 1)
            slot[t, s] = taken.get(key, -1) if op != Op.IDLE else -1
            if op == closes:
                taken.pop(key, None)
    return Slots(slot, per_stage)


def lowest_free(taken: Iterable[int]) -> int:
    """The lowest slot that is free.

    Taking it, in order of time, is optimal for intervals: it uses exactly as many slots as are ever
    needed at once.
    """
    numbers = set(taken)
    return min(set(range(len(numbers) + 1)) - numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Inbox:
    """Where what arrives waits for the operation that needs it.

    Attributes:
        size: slots on every stage, at least 1.
        num_lanes: permutes in an exchange, see `table.lanes`.
        read: int32 `[ticks, stages]`, the slot that each operation reads; 0 where it needs none.
        write: int32 `[num_lanes, ticks, stages]`, the slot for what arrives over each lane of what
            tick `t` made; `size - 1` where nobody needs it, a slot that nobody else has then.
    """

    size: int
    num_lanes: int
    read: NDArray[np.int32]
    write: NDArray[np.int32]


def assign_inbox(schedule: Schedule) -> Inbox:
    """Give each arrival the lowest slot that is free from then until it is used.

    In a table where everything is used as soon as it arrives, one slot holds all.
    """
    by_route = [lanes(schedule.num_stages, route) for route in schedule.routes]
    num_lanes = max((len(own) for own in by_route), default=1)
    read = np.zeros(schedule.op.shape, np.int32)
    write = np.full((num_lanes, *schedule.op.shape), -1, np.int32)
    virtual = schedule.virtual_stage
    taken: list[dict[tuple[int, int, int], int]] = [{} for _ in range(schedule.num_stages)]
    size, crowded = 1, False
    for t in range(schedule.num_ticks):
        # What tick t - hop made lies in the inbox when tick t begins; slots of what earlier ticks
        # used are free for it.
        made = t - schedule.hop
        for s in range(schedule.num_stages) if made >= 0 else ():
            op, v = Op(int(schedule.op[made, s])), int(virtual[made, s])
            user = schedule.user_of(op, v)
            if user is None:
                continue
            d = schedule.stage_of(user)
            own = by_route[int(schedule.route[made])]
            lane = next((k for k, edges in enumerate(own) if (s, d) in edges), None)
            if lane is None:  # not in a table that `check_schedule` accepts
                continue
            key = int(op), int(schedule.microbatch[made, s]), user
            taken[d][key] = write[lane, made, d] = lowest_free(taken[d].values())
            size = max(size, int(write[lane, made, d]) + 1)
        for d in range(schedule.num_stages) if made >= 0 else ():
            crowded |= bool(taken[d]) and bool((write[:, made, d] < 0).any())
        for s in range(schedule.num_stages):
            key = int(schedule.op[t, s]), int(schedule.microbatch[t, s]), int(virtual[t, s])
            if key in taken[s]:
                read[t, s] = taken[s].pop(key)
    size += crowded  # what nobody needs must not fall onto what somebody does
    return Inbox(size, num_lanes, read, np.where(write < 0, size - 1, write).astype(np.int32))
