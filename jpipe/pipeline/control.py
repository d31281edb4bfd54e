"""Control flow within a tick: conditional operations, and exchanges between neighbours."""

from typing import Any

import jax
import jax.numpy as jnp

from jpipe.pipeline import stash
from jpipe.pipeline.rows import Beat, Row
from jpipe.pipeline.stages import Tree
from jpipe.schedule.slots import Inbox
from jpipe.schedule.table import Route, Schedule, lanes


def when(predicate: jax.Array, operation: Any, *operands: Any) -> Any:
    """The operation's results where the predicate holds, else its operands as they are.

    A switch instead of a cond, for the sake of the order of the branches: XLA for GPUs puts the
    true branch of a cond first, and up to jaxlib 0.10 copies all that a branch passes on as it is,
    unless that branch is the first one (openxla/xla pull request 46314).
    """

    def skip(*operands: Any) -> Any:
        return operands[0] if len(operands) == 1 else operands

    return jax.lax.switch(predicate.astype(jnp.int32), [skip, operation], *operands)


def send(
    payload: Tree, schedule: Schedule, num_lanes: int, beat: Beat, row: Row, axis: str
) -> tuple[Tree, ...]:
    """Send each stage's payload along the route of this tick.

    Every stage takes part, whatever it did in the tick. Where the route has to be picked at run
    time, all stages pick the same one, so that none waits in a branch that the others don't take.

    Args:
        payload: pytree of arrays.
        schedule: the table.
        num_lanes: how many permutes an exchange has at most.
        beat: this tick's place in the period.
        row: this tick's row.
        axis: the mesh axis of the stages; must be manual.

    Returns:
        What arrived over each lane. Where nothing did, the content is arbitrary.
    """

    def along(route: Route, payload: Tree) -> tuple[Tree, ...]:
        def permute(edges: Route) -> Tree:
            return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axis, edges), payload)

        arrived = [
            payload if all(a == b for a, b in edges) else permute(edges)
            for edges in lanes(schedule.num_stages, route)
            if edges
        ]
        return (*arrived, *[payload] * (num_lanes - len(arrived)))

    if beat.route is not None:
        return along(beat.route, payload)
    branches = [lambda p, r=route: along(r, p) for route in schedule.routes]
    return jax.lax.switch(row.route, branches, payload)


def deliver(letters: Tree, arrived: tuple[Tree, ...], inbox: Inbox, row: Row) -> Tree:
    """The inbox with what has arrived.

    Args:
        letters: pytree of `[inbox.size, ...]` arrays, the inbox.
        arrived: what came over each lane.
        inbox: its slots.
        row: this tick's row.
    """
    for payload, slot in zip(arrived, row.write, strict=True):
        letters = stash.write(letters, slot if inbox.size > 1 else 0, payload)
    return letters


def fetch(letters: Tree, inbox: Inbox, row: Row) -> Tree:
    """What the operation of this tick needs of the inbox."""
    return stash.read(letters, row.read if inbox.size > 1 else 0)
