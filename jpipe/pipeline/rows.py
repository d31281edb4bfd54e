"""The schedule's table as the executor reads it: one stage's column, tick by tick."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jpipe.schedule.slots import Inbox, assign_slots, assign_weight_slots
from jpipe.schedule.table import Op, Route, Schedule


class Row(NamedTuple):
    """One stage's part of one row of the table; int32 scalars, or arrays of them by tick.

    Attributes:
        op: a value of `Op`.
        microbatch: which microbatch; meaningless where the stage idles.
        chunk: which of the stage's chunks; meaningless where the stage idles.
        slot: where the stage keeps what a forward leaves.
        weight_slot: where it keeps what a backward leaves for the weight gradient.
        read: where in the inbox the operation's input lies.
        write: for each lane where in the inbox to put what arrives in this tick.
        route: index of the exchange that runs in this tick, the same on every stage.
    """

    op: jax.Array
    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    weight_slot: jax.Array
    read: jax.Array
    write: tuple[jax.Array, ...]
    route: jax.Array


class Beat(NamedTuple):
    """What is the same in every tick at one place of the table's period.

    Attributes:
        route: the exchange; None if it differs from tick to tick.
        ops: the kinds of operation that occur on any stage.
    """

    route: Route | None
    ops: frozenset[Op]


def table_rows(schedule: Schedule, inbox: Inbox, axis: str) -> tuple[list[Beat], Row]:
    """What is known of a table when the program is compiled, and the rest as arrays.

    Where the routes of the table repeat, its rows come in groups of one period. Where they do not
    (GPipe), a group is one row, and `Row.route` says which route to take.

    Args:
        schedule: the table.
        inbox: where what arrives waits.
        axis: the mesh axis of the stages; must be manual.

    Returns:
        A beat for each tick of a period, and this stage's rows, each field int32
        `[ticks / period, period]`, padded with idle ticks.
    """
    period = schedule.period or 1
    # A tick begins with the exchange of what the tick before it made.
    route, written = np.roll(schedule.route, 1), np.roll(inbox.write, 1, axis=1)
    beats = [
        Beat(
            route=schedule.routes[route[k]] if schedule.period else None,
            ops=frozenset(Op(op) for op in np.unique(schedule.op[k::period])),
        )
        for k in range(period)
    ]
    stage = jax.lax.axis_index(axis)
    pad = ((0, -schedule.num_ticks % period), (0, 0))

    def column(cells: NDArray[Any]) -> jax.Array:
        cells = np.pad(cells, pad).astype(np.int32)
        mine = jax.lax.dynamic_index_in_dim(jnp.asarray(cells), stage, 1, keepdims=False)
        return mine.reshape(-1, period)

    rows = Row(
        op=column(schedule.op),
        microbatch=column(schedule.microbatch),
        chunk=column(schedule.chunk),
        slot=column(assign_slots(schedule).slot),
        weight_slot=column(assign_weight_slots(schedule).slot),
        read=column(inbox.read),
        write=tuple(column(lane) for lane in written),
        route=column(np.broadcast_to(route[:, None], schedule.op.shape)),
    )
    return beats, rows
