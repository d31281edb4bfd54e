"""Control flow within a tick: conditional operations, and exchanges between neighbours."""

from typing import Any

import jax

from jpipe.pipeline.rows import Beat, Row
from jpipe.pipeline.stages import Tree
from jpipe.schedule.table import Route, Schedule


def when(predicate: jax.Array, operation: Any, *operands: Any) -> Any:
    """The operation's results where the predicate holds, else its operands as they are."""

    def skip(*operands: Any) -> Any:
        return operands[0] if len(operands) == 1 else operands

    return jax.lax.cond(predicate, operation, skip, *operands)


def send(payload: Tree, schedule: Schedule, beat: Beat, row: Row, axis: str) -> Tree:
    """Send each stage's payload along the route of this tick.

    Every stage takes part, whatever it did in the tick. Where the route has to be picked at run
    time, all stages pick the same one, so that none waits in a branch that the others don't take.

    Args:
        payload: pytree of arrays.
        schedule: the table.
        beat: this tick's place in the period.
        row: this tick's row.
        axis: the mesh axis of the stages; must be manual.

    Returns:
        What arrived. Where nothing did, the content is arbitrary.
    """

    def along(route: Route, payload: Tree) -> Tree:
        if not route:
            return payload
        return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axis, route), payload)

    if beat.route is not None:
        return along(beat.route, payload)
    branches = [lambda p, r=route: along(r, p) for route in schedule.routes]
    return jax.lax.switch(row.route, branches, payload)
