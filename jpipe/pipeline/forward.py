"""Run the model forward only: the losses of batches, or its outputs."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jpipe.mesh import STAGE
from jpipe.pipeline import stash
from jpipe.pipeline.control import send, when
from jpipe.pipeline.divide import divide, divided_examples
from jpipe.pipeline.keys import microbatch_keys
from jpipe.pipeline.program import body_program
from jpipe.pipeline.rows import Row, table_rows
from jpipe.pipeline.stages import Parts, Tree
from jpipe.pipeline.state import Variables
from jpipe.schedule.builders import forward_only_schedule
from jpipe.schedule.table import Op

T = TypeVar("T")


def run_forward(
    parts: Parts,
    num_stages: int,
    own: Variables,
    body_shapes: Variables,
    key: jax.Array | None,
    inputs: Tree,
    consume: Callable[[T, Tree, jax.Array], T],
    nothing: Callable[[Tree], T],
) -> T:
    """Send every microbatch through the pipeline once; to be used where the `stage` axis is manual.

    Args:
        parts: the model.
        num_stages: P.
        own: this stage's variables, see `layout.gather_params`; all state constant.
        body_shapes: shapes and dtypes of the body's variables, see `program.body_program`.
        key: a random key, or None.
        inputs: pytree of `[M, microbatch, ...]` arrays.
        consume: `(result so far, outputs of the head, microbatch) -> result`, called for each
            microbatch in order on the last stage only.
        nothing: `(shapes and dtypes of outputs) -> result` before the first microbatch.

    Returns:
        The result on the last stage, `nothing` on the others.
    """
    num_microbatches = jax.tree.leaves(inputs)[0].shape[0]
    schedule = forward_only_schedule(num_stages, num_microbatches)
    beats, rows = table_rows(schedule, STAGE)
    stage = jax.lax.axis_index(STAGE)
    params, state, _ = own
    examples = divided_examples(inputs)

    def stem(microbatch: jax.Array | int) -> Tree:
        keys = microbatch_keys(key, microbatch)
        own = divide(stash.read(inputs, microbatch), examples)
        return divide(parts.stem(params.stem, state.stem, own, keys.stem)[0], examples)

    def head(payload: Tree, microbatch: jax.Array | int) -> Tree:
        keys = microbatch_keys(key, microbatch)
        x = divide(program.leave(payload), examples)
        return parts.head(params.head, state.head, x, keys.head)[0]

    def body(payload: Tree, microbatch: jax.Array) -> Tree:
        return program.run(own.part("body"), payload, microbatch_keys(key, microbatch).body)

    program = body_program(
        parts.body,
        STAGE,
        own.part("body"),
        body_shapes,
        jax.eval_shape(stem, 0),
        microbatch_keys(key, 0).body,
        examples,
    )

    def group(carry: tuple[Tree, T], rows: Row) -> tuple[tuple[Tree, T], None]:
        payload, result = carry
        for k, beat in enumerate(beats):
            row: Row = jax.tree.map(lambda column, k=k: column[k], rows)
            run = row.op == Op.FORWARD
            payload = when(
                run & (stage == 0), lambda _, i=row.microbatch: program.enter(stem(i)), payload
            )
            payload = when(run, lambda x, i=row.microbatch: body(x, i), payload)
            result = when(
                run & (stage == num_stages - 1),
                lambda r, y=payload, i=row.microbatch: consume(r, head(y, i), i),
                result,
            )
            payload = send(payload, schedule, beat, row, STAGE)
        return (payload, result), None

    idle = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), program.payload)
    start = nothing(jax.eval_shape(head, program.payload, 0))
    (_, result), _ = jax.lax.scan(group, (idle, start), rows)
    return result
