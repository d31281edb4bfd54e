"""The body as the executor runs it, whether all stages are alike or not.

Where they are alike, one function serves all. Where they are not, a switch on the stage picks the
stage's own; the gradient is taken inside of each branch, since that of a whole switch would keep
the residuals of every branch. What differs between stages (parameters, activations, what is kept)
lies in vectors of one size, see `packing`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jpipe.pipeline.packing import Packing
from jpipe.pipeline.per_stage import PerStage
from jpipe.pipeline.residuals import SplitGradient, split_gradient
from jpipe.pipeline.stages import Body, Stages, Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The body in terms of what travels.

    Attributes:
        payload: shapes and dtypes of what travels between stages.
        enter: `(stem's output) -> payload`.
        leave: `(last stage's payload) -> head's input`.
        run: `(this stage's parameters, payload) -> payload`.
        split: its gradient, cut into forward and backward; made when asked for, since evaluation
            has no use for it.
    """

    payload: Tree
    enter: Callable[[Tree], Tree]
    leave: Callable[[Tree], Tree]
    run: Callable[[Tree, Tree], Tree]
    split: Callable[[], SplitGradient]


def body_program(stages: Stages, axis: str, params: Tree, shapes: Tree, x: Tree) -> Program:
    """Bring the body of a model into the form that runs.

    Args:
        stages: the model.
        axis: the mesh axis of the stages; must be manual.
        params: this stage's parameters, packed if the stages differ.
        shapes: shapes and dtypes of the body's parameters: a `PerStage` if the stages differ.
        x: shapes and dtypes of the stem's output.
    """
    if isinstance(stages.body, PerStage):
        return _uneven(stages.body, axis, shapes, x)
    body = stages.body
    return Program(
        payload=x,
        enter=lambda x: x,
        leave=lambda x: x,
        run=body,
        split=lambda: split_gradient(body, params, x),
    )


def boundaries(body: PerStage[Body], params: PerStage[Tree], x: Tree) -> list[Tree]:
    """Shapes and dtypes of what enters each stage, and of what leaves the last."""
    found = [x]
    for run, own in zip(body, params, strict=True):
        found.append(jax.eval_shape(run, own, found[-1]))
    return found


def _uneven(body: PerStage[Body], axis: str, shapes: PerStage[Tree], x: Tree) -> Program:
    between = boundaries(body, shapes, x)
    activations, weights = Packing(between), Packing(tuple(shapes))

    def by_stage(branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        return jax.lax.switch(jax.lax.axis_index(axis), branches, *operands)

    def run(packed: Tree, payload: Tree) -> Tree:
        def branch(s: int) -> Callable[[Tree, Tree], Tree]:
            def run_one(packed: Tree, payload: Tree) -> Tree:
                y = body[s](weights.unpack(s, packed), activations.unpack(s, payload))
                return activations.pack(s + 1, y)

            return run_one

        return by_stage([branch(s) for s in range(len(body))], packed, payload)

    def split() -> SplitGradient:
        splits = [split_gradient(f, p, a) for f, p, a in zip(body, shapes, between, strict=False)]
        kept = Packing([split.kept for split in splits])
        names = sorted(kept.shapes)

        def forward_of(s: int) -> Callable[[Tree, Tree], tuple[Tree, list[jax.Array]]]:
            def forward(packed: Tree, payload: Tree) -> tuple[Tree, list[jax.Array]]:
                x = activations.unpack(s, payload)
                y, residuals = splits[s].forward(weights.unpack(s, packed), x)
                vectors = kept.pack(s, residuals)
                return activations.pack(s + 1, y), [vectors[name] for name in names]

            return forward

        def backward_of(s: int) -> Callable[[Tree, list[jax.Array], Tree], tuple[Tree, Tree]]:
            def backward(packed: Tree, vectors: list[jax.Array], dy: Tree) -> tuple[Tree, Tree]:
                residuals = kept.unpack(s, dict(zip(names, vectors, strict=True)))
                dy = activations.unpack(s + 1, dy)
                dparams, dx = splits[s].backward(weights.unpack(s, packed), residuals, dy)
                return weights.pack(s, dparams), activations.pack(s, dx)

            return backward

        stages = range(len(body))
        return SplitGradient(
            kept=[kept.shapes[name] for name in names],
            forward=lambda *o: by_stage([forward_of(s) for s in stages], *o),
            backward=lambda *o: by_stage([backward_of(s) for s in stages], *o),
        )

    return Program(
        payload=activations.shapes,
        enter=lambda x: activations.pack(0, x),
        leave=lambda payload: activations.unpack(len(body), payload),
        run=run,
        split=split,
    )
