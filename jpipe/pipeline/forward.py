"""Run the model forward only: the losses of batches, or its outputs."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jpipe.mesh import STAGE
from jpipe.pipeline import stash
from jpipe.pipeline.control import send, when
from jpipe.pipeline.program import body_program
from jpipe.pipeline.rows import Row, table_rows
from jpipe.pipeline.stages import Params, Stages, Tree
from jpipe.schedule.builders import forward_only_schedule
from jpipe.schedule.table import Op

T = TypeVar("T")


def run_forward(
    stages: Stages,
    num_stages: int,
    params: Params,
    body_shapes: Tree,
    inputs: Tree,
    consume: Callable[[T, Tree, jax.Array], T],
    start: T,
) -> T:
    """Send every microbatch through the pipeline once; to be used where the `stage` axis is manual.

    Args:
        stages: the model.
        num_stages: P.
        params: this stage's parameters, see `layout.gather_params`.
        body_shapes: shapes and dtypes of the body's parameters, see `program.body_program`.
        inputs: pytree of `[M, microbatch, ...]` arrays.
        consume: `(result so far, outputs of the head, microbatch) -> result`, called for each
            microbatch in order on the last stage only.
        start: the result before the first microbatch.

    Returns:
        The result on the last stage, `start` on the others.
    """
    num_microbatches = jax.tree.leaves(inputs)[0].shape[0]
    schedule = forward_only_schedule(num_stages, num_microbatches)
    beats, rows = table_rows(schedule, STAGE)
    stage = jax.lax.axis_index(STAGE)
    x = stages.boundary(params.stem, inputs)
    program = body_program(stages, STAGE, params.body, body_shapes, x)

    def enter(microbatch: jax.Array) -> Tree:
        return program.enter(stages.stem(params.stem, stash.read(inputs, microbatch)))

    def group(carry: tuple[Tree, T], rows: Row) -> tuple[tuple[Tree, T], None]:
        payload, result = carry
        for k, beat in enumerate(beats):
            row: Row = jax.tree.map(lambda column, k=k: column[k], rows)
            run = row.op == Op.FORWARD
            payload = when(
                run & (stage == 0),
                lambda _, i=row.microbatch: enter(i),
                payload,
            )
            payload = when(run, lambda x: program.run(params.body, x), payload)
            result = when(
                run & (stage == num_stages - 1),
                lambda r, y=payload, i=row.microbatch: consume(
                    r, stages.head(params.head, program.leave(y)), i
                ),
                result,
            )
            payload = send(payload, schedule, beat, row, STAGE)
        return (payload, result), None

    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), program.payload)
    (_, result), _ = jax.lax.scan(group, (nothing, start), rows)
    return result
