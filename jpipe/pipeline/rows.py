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
        virtual: the virtual stage that this is; meaningless where the stage idles.
        slot: where the stage keeps what a forward leaves.
        weight_slot: where it keeps what a backward leaves for the weight gradient.
        read: where in the inbox the operation's input lies.
        write: for each lane where in the inbox to put what this tick's exchange brings.
        route: index of the exchange that runs in this tick, the same on every stage.
        tick: number of the row, the same on every stage.
    """

    op: jax.Array
    microbatch: jax.Array
    chunk: jax.Array
    virtual: jax.Array
    slot: jax.Array
    weight_slot: jax.Array
    read: jax.Array
    write: tuple[jax.Array, ...]
    route: jax.Array
    tick: jax.Array


class Rows(NamedTuple):
    """A row and the one after it."""

    now: Row
    next: Row


class Beat(NamedTuple):
    """What is the same in every tick at one place of the table's period.

    Attributes:
        route: the exchange; None if it differs from tick to tick.
        ops: the kinds of operation that occur on any stage.
        next_ops: the same of the next tick.
    """

    route: Route | None
    ops: frozenset[Op]
    next_ops: frozenset[Op]


def table_rows(schedule: Schedule, inbox: Inbox, axis: str) -> tuple[list[Beat], Rows]:
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
    # With hop 2 a tick sends what the tick before it made.
    route = np.roll(schedule.route, schedule.hop - 1)
    written = np.roll(inbox.write, schedule.hop - 1, axis=1)

    def ops(k: int) -> frozenset[Op]:
        return frozenset(Op(op) for op in np.unique(schedule.op[k % period :: period]))

    beats = [
        Beat(
            route=schedule.routes[route[k]] if schedule.period else None,
            ops=ops(k),
            next_ops=ops(k + 1),
        )
        for k in range(period)
    ]
    stage = jax.lax.axis_index(axis)

    def column(cells: NDArray[Any], ahead: int) -> jax.Array:
        pad = ((0, -len(cells) % period + ahead), (0, 0))
        cells = np.pad(cells, pad).astype(np.int32)[ahead:]
        mine = jax.lax.dynamic_index_in_dim(jnp.asarray(cells), stage, 1, keepdims=False)
        return mine.reshape(-1, period)

    slot, weight_slot = assign_slots(schedule).slot, assign_weight_slots(schedule).slot
    route_of_stage = np.broadcast_to(route[:, None], schedule.op.shape)
    tick = np.broadcast_to(np.arange(len(route))[:, None], schedule.op.shape)

    def row(ahead: int) -> Row:
        return Row(
            op=column(schedule.op, ahead),
            microbatch=column(schedule.microbatch, ahead),
            chunk=column(schedule.chunk, ahead),
            virtual=column(schedule.virtual_stage, ahead),
            slot=column(slot, ahead),
            weight_slot=column(weight_slot, ahead),
            read=column(inbox.read, ahead),
            write=tuple(column(lane, ahead) for lane in written),
            route=column(route_of_stage, ahead),
            tick=column(tick, ahead),
        )

    return beats, Rows(row(0), row(1))
