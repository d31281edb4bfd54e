"""Run the model forward only: the losses of batches, or its outputs."""

from collections.abc import Callable
from typing import TypeVar

import jax

from jpipe.mesh import STAGE
from jpipe.pipeline import stash
from jpipe.pipeline.control import deliver, fetch, send, when
from jpipe.pipeline.divide import divide, divided_examples
from jpipe.pipeline.keys import microbatch_keys
from jpipe.pipeline.per_stage import chunks_of
from jpipe.pipeline.program import body_program
from jpipe.pipeline.rows import Row, table_rows
from jpipe.pipeline.stages import Parts, Tree
from jpipe.pipeline.state import Variables
from jpipe.schedule.builders import forward_only_schedule
from jpipe.schedule.slots import assign_inbox
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
    num_chunks = len(chunks_of(parts.body))
    schedule = forward_only_schedule(num_stages, num_microbatches, num_chunks)
    boxes = assign_inbox(schedule)
    beats, rows = table_rows(schedule, boxes, STAGE)
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

    def body(c: int, payload: Tree, microbatch: jax.Array) -> Tree:
        keys = microbatch_keys(key, microbatch)
        return program.run(c, own.part("body").chunks()[c], payload, keys.body)

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
        inbox, result = carry
        for k, beat in enumerate(beats):
            row: Row = jax.tree.map(lambda column, k=k: column[k], rows)
            payload = fetch(inbox, boxes, row)
            run = [(row.op == Op.FORWARD) & (row.chunk == c) for c in range(num_chunks)]
            payload = when(
                run[0] & (stage == 0), lambda _, i=row.microbatch: program.enter(stem(i)), payload
            )
            for c in range(num_chunks):
                payload = when(run[c], lambda x, c=c, i=row.microbatch: body(c, x, i), payload)
            result = when(
                run[-1] & (stage == num_stages - 1),
                lambda r, y=payload, i=row.microbatch: consume(r, head(y, i), i),
                result,
            )
            arrived = send(payload, schedule, boxes.num_lanes, beat, row, STAGE)
            inbox = deliver(inbox, arrived, boxes, row)
        return (inbox, result), None

    start = nothing(jax.eval_shape(head, program.payload, 0))
    inbox = stash.empty(boxes.size, program.payload)
    (_, result), _ = jax.lax.scan(group, (inbox, start), rows.now)
    return result
