"""The body as the executor runs it, whether all stages are alike or not.

Where they are alike, one function serves all. Where they are not, a switch on the stage picks the
stage's own; the gradient is taken inside of each branch, since that of a whole switch would keep
the residuals of every branch. What differs between stages (parameters, state, activations, what is
kept) lies in vectors of one size, see `packing`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jpipe.pipeline.divide import divide
from jpipe.pipeline.keys import block_keys
from jpipe.pipeline.packing import Packing
from jpipe.pipeline.per_stage import PerStage
from jpipe.pipeline.residuals import SplitGradient, split_gradient
from jpipe.pipeline.stages import Part, Tree, num_blocks
from jpipe.pipeline.state import State, Variables

Key = jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The body in terms of what travels.

    Attributes:
        payload: shapes and dtypes of what travels between stages.
        enter: `(stem's output) -> payload`.
        leave: `(last stage's payload) -> head's input`.
        run: `(this stage's variables, payload, the body's key) -> payload`.
        split: its gradient, cut into forward and backward, where "again" is the constant state and
            the key, "once" the moving state and "aux" its updates; made when asked for, since
            evaluation has no use for it.
    """

    payload: Tree
    enter: Callable[[Tree], Tree]
    leave: Callable[[Tree], Tree]
    run: Callable[[Variables, Tree, Key], Tree]
    split: Callable[[], SplitGradient]


def body_program(
    body: Part | PerStage[Part],
    axis: str,
    own: Variables,
    shapes: Variables,
    x: Tree,
    key: Key,
    rows: int | None,
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
    """
    if isinstance(body, PerStage):
        return _uneven(body, axis, shapes, x, key, rows)

    def run(params: Tree, again: tuple[Tree, Key], x: Tree, moving: Tree) -> tuple[Tree, Tree]:
        constant, key = again
        state = State(moving, constant).whole()
        count = num_blocks(params, state)
        first = jax.lax.axis_index(axis) * count
        keys = block_keys(key, first, count)
        y, updates = body(params, state, divide(x, rows), keys)
        return divide(y, rows), updates

    return Program(
        payload=x,
        enter=lambda x: x,
        leave=lambda x: x,
        run=lambda own, x, key: run(own.params, (own.constant, key), x, own.moving)[0],
        split=lambda: split_gradient(run, own.params, (own.constant, key), x, own.moving),
    )


def boundaries(body: PerStage[Part], shapes: Variables, x: Tree, key: Key) -> list[Tree]:
    """Shapes and dtypes of what enters each stage, and of what leaves the last."""
    found = [x]
    for run, params, constant, moving in zip(body, *shapes, strict=True):
        state = State(moving, constant).whole()
        found.append(jax.eval_shape(run, params, state, found[-1], key)[0])
    return found


def _uneven(
    body: PerStage[Part], axis: str, shapes: Variables, x: Tree, key: Key, rows: int | None
) -> Program:
    between = boundaries(body, shapes, x, key)
    activations = Packing(between, rows)
    weights, constants, movings = (Packing(tuple(kind)) for kind in shapes)
    stages = range(len(body))

    def by_stage(of_stage: Callable[[int], Callable[..., Any]], *operands: Any) -> Any:
        return jax.lax.switch(jax.lax.axis_index(axis), [of_stage(s) for s in stages], *operands)

    def function(s: int) -> Any:
        def run(params: Tree, again: tuple[Tree, Key], x: Tree, moving: Tree) -> Any:
            constant, key = again
            y, updates = body[s](params, State(moving, constant).whole(), divide(x, rows), key)
            return divide(y, rows), updates

        return run

    def run_of(s: int) -> Callable[[Variables, Tree, Key], Tree]:
        def run(own: Variables, payload: Tree, key: Key) -> Tree:
            again = constants.unpack(s, own.constant), key
            x, moving = activations.unpack(s, payload), movings.unpack(s, own.moving)
            y, _ = function(s)(weights.unpack(s, own.params), again, x, moving)
            return activations.pack(s + 1, y)

        return run

    def split() -> SplitGradient:
        splits = [
            split_gradient(function(s), params, (constant, key), between[s], moving)
            for s, params, constant, moving in zip(stages, *shapes, strict=True)
        ]
        kept = Packing([split.kept for split in splits], rows)
        names = sorted(kept.shapes)

        def forward_of(s: int) -> Callable[..., tuple[Tree, Tree, list[jax.Array]]]:
            def forward(
                params: Tree, again: tuple[Tree, Key], payload: Tree, moving: Tree
            ) -> tuple[Tree, Tree, list[jax.Array]]:
                y, updates, residuals = splits[s].forward(
                    weights.unpack(s, params),
                    (constants.unpack(s, again[0]), again[1]),
                    activations.unpack(s, payload),
                    movings.unpack(s, moving),
                )
                vectors = kept.pack(s, residuals)
                moved = movings.pack(s, updates)
                return activations.pack(s + 1, y), moved, [vectors[name] for name in names]

            return forward

        def backward_of(s: int) -> Callable[..., tuple[Tree, Tree]]:
            def backward(
                params: Tree, again: tuple[Tree, Key], vectors: list[jax.Array], dy: Tree
            ) -> tuple[Tree, Tree]:
                dparams, dx = splits[s].backward(
                    weights.unpack(s, params),
                    (constants.unpack(s, again[0]), again[1]),
                    kept.unpack(s, dict(zip(names, vectors, strict=True))),
                    activations.unpack(s + 1, dy),
                )
                return weights.pack(s, dparams), activations.pack(s, dx)

            return backward

        return SplitGradient(
            kept=[kept.shapes[name] for name in names],
            forward=lambda *operands: by_stage(forward_of, *operands),
            backward=lambda *operands: by_stage(backward_of, *operands),
        )

    return Program(
        payload=activations.shapes,
        enter=lambda x: activations.pack(0, x),
        leave=lambda payload: activations.unpack(len(body), payload),
        run=lambda own, payload, key: by_stage(run_of, own, payload, key),
        split=split,
    )
