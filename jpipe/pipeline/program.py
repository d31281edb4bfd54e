"""The body as the executor runs it, whether all stages are alike or not.

Chunk c of stage s is the piece `c * P + s` of the body, a virtual stage; where a schedule is folded
and c odd, `c * P + P - 1 - s`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jpipe.pipeline.divide import divide
from jpipe.pipeline.keys import block_keys
from jpipe.pipeline.per_stage import PerStage, chunks_of
from jpipe.pipeline.residuals import SplitGradient, split_gradient
from jpipe.pipeline.stages import Part, Tree, num_blocks
from jpipe.pipeline.state import State, Variables
from jpipe.pipeline.uneven import UnevenBody
from jpipe.pipeline.weight_gradient import SplitBackward, split_backward
from jpipe.schedule.table import nth_of_chunk

Key = jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The body in terms of what travels.

    Attributes:
        payload: shapes and dtypes of what travels between stages.
        enter: `(stem's output) -> payload`.
        leave: `(last virtual stage's payload) -> head's input`.
        again: `(chunk, its constant state, the body's key)` -> what the backward of the chunk has
            as well as the forward, see `split_gradient`.
        run: `(chunk, this stage's variables of it, payload, the body's key) -> payload`.
        split: `(chunk)` -> its gradient, cut into forward and backward, where "once" is the moving
            state and "aux" its updates. What is kept has the same shapes for every chunk.
        split_backward: `(chunk, its split gradient)` -> its backward, cut in two; what is left has
            the same shapes for every chunk.
    """

    payload: Tree
    enter: Callable[[Tree], Tree]
    leave: Callable[[Tree], Tree]
    again: Callable[[int, Tree, Key], Tree]
    run: Callable[[int, Variables, Tree, Key], Tree]
    split: Callable[[int], SplitGradient]
    split_backward: Callable[[int, SplitGradient], SplitBackward]


def body_program(
    body: Any,
    axis: str,
    own: Variables,
    shapes: Variables,
    x: Tree,
    key: Key,
    rows: int | None,
    *,
    folded: bool = False,
) -> Program:
    """Bring the body of a model into the form that runs.

    Args:
        body: of the model.
        axis: the mesh axis of the stages; must be manual.
        own: this stage's variables, packed if the stages differ.
        shapes: shapes and dtypes of the body's variables: `PerStage` if the stages differ.
        x: shapes and dtypes of the stem's output.
        key: the body's key in any microbatch, or None.
        rows: examples of a microbatch, where XLA divides them over devices, see `packing`.
        folded: whether every other chunk goes back over the stages, see `Schedule`.
    """
    bodies = chunks_of(body)
    if isinstance(bodies[0], PerStage):
        uneven = UnevenBody.of(bodies, axis, shapes, x, key, rows, folded=folded)
        return Program(
            payload=uneven.activations.shapes,
            enter=lambda x: uneven.activations.pack(0, x),
            leave=lambda payload: uneven.activations.unpack(len(uneven.functions), payload),
            again=lambda c, constant, key: (constant, key),
            run=uneven.run,
            split=uneven.split,
            split_backward=lambda c, _: uneven.split_backward(c),
        )
    return _even(bodies, axis, own, x, key, rows, folded)


def _even(
    bodies: Sequence[Part],
    axis: str,
    own: Variables,
    x: Tree,
    key: Key,
    rows: int | None,
    folded: bool,
) -> Program:
    chunk, *_ = own.chunks()
    count = num_blocks(chunk.params, State(chunk.moving, chunk.constant).whole())

    def function(c: int) -> Any:
        def run(params: Tree, again: tuple[Tree, Key], x: Tree, moving: Tree) -> Any:
            constant, keys = again
            y, updates = bodies[c](params, State(moving, constant).whole(), divide(x, rows), keys)
            return divide(y, rows), updates

        return run

    def again(c: int, constant: Tree, key: Key) -> Tree:
        stage, num_stages = jax.lax.axis_index(axis), jax.lax.axis_size(axis)
        virtual = c * num_stages + nth_of_chunk(stage, c, num_stages, folded=folded)
        return constant, block_keys(key, virtual * count, count)

    def split(c: int) -> SplitGradient:
        own_again = again(c, chunk.constant, key)
        return split_gradient(function(c), chunk.params, own_again, x, chunk.moving)

    return Program(
        payload=x,
        enter=lambda x: x,
        leave=lambda x: x,
        again=again,
        run=lambda c, own, x, key: function(c)(
            own.params, again(c, own.constant, key), x, own.moving
        )[0],
        split=split,
        split_backward=lambda c, split: split_backward(
            split, chunk.params, again(c, chunk.constant, key), x
        ),
    )
