"""What a model must provide to run in a pipeline."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.pipeline.per_stage import PerStage

Tree = Any
"""A pytree of arrays."""


Body = Callable[[Tree, Tree], Tree]
"""`(parameters, x) -> x`."""


class Params(NamedTuple):
    """Parameters of a pipelined model, or anything of their structure, such as gradients.

    Attributes:
        stem: of what only the first stage runs.
        body: of the repeated blocks; every leaf has the blocks stacked in its first dim, which
            lies over the mesh's `stage` axis. If the stages differ, a `PerStage` of their
            parameters.
        head: of what only the last stage runs.
    """

    stem: Tree
    body: Tree
    head: Tree


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model cut into stem, body and head.

    The three are pure functions. `x` is a pytree of floating-point arrays, the activation that
    travels between stages; where all stages are alike it has the same shapes and dtypes at every
    boundary. What is kept from forward to backward is what `jax.vjp` saves of `body`, so wrap it,
    or the blocks in it, in `jax.checkpoint` to keep less.

    Attributes:
        stem: `(params.stem, inputs of a microbatch) -> x`.
        body: `(blocks, x) -> x`, where `blocks` is a slice of `params.body` along its first dim:
            the blocks of one stage, or all of them on one device. If the stages differ, a
            `PerStage` of functions `(params.body[s], x) -> x`, whose shapes may differ too.
        head: `(params.head, x) -> outputs`, any pytree.
    """

    stem: Callable[[Tree, Tree], Tree]
    body: Body | PerStage[Body]
    head: Callable[[Tree, Tree], Tree]

    def boundary(self, stem_params: Tree, inputs: Tree) -> Tree:
        """Shapes and dtypes of `x` for inputs of `[M, microbatch, ...]`."""

        def first(params: Tree, inputs: Tree) -> Tree:
            return self.stem(params, jax.tree.map(lambda a: a[0], inputs))

        return jax.eval_shape(first, stem_params, inputs)

    def run_body(self, params: Tree, x: Tree) -> Tree:
        """The whole body on one device."""
        if not isinstance(self.body, PerStage):
            return self.body(params, x)
        for run, own in zip(self.body, params, strict=True):
            x = run(own, x)
        return x

    def top(self, body_params: Tree, x: Tree) -> Tree:
        """Shapes and dtypes of what enters the head, for `x` from the stem."""
        return jax.eval_shape(self.run_body, body_params, x) if self.differ else x

    @property
    def differ(self) -> bool:
        """Whether the stages differ."""
        return isinstance(self.body, PerStage)


def shapes_of(tree: Tree) -> Tree:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), tree)
