"""What a model must provide to run in a pipeline."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Tree = Any
"""A pytree of arrays."""


class Params(NamedTuple):
    """Parameters of a pipelined model, or anything of their structure, such as gradients.

    Attributes:
        stem: of what only the first stage runs.
        body: of the repeated blocks; every leaf has the blocks stacked in its first dim, which
            lies over the mesh's `stage` axis.
        head: of what only the last stage runs.
    """

    stem: Tree
    body: Tree
    head: Tree


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model cut into stem, body and head.

    The three are pure functions. `x` is a pytree of floating-point arrays, the activation that
    travels between stages; it has the same shapes and dtypes at every boundary. What is kept from
    forward to backward is what `jax.vjp` saves of `body`, so wrap it, or the blocks in it, in
    `jax.checkpoint` to keep less.

    Attributes:
        stem: `(params.stem, inputs of a microbatch) -> x`.
        body: `(blocks, x) -> x`, where `blocks` is a slice of `params.body` along its first dim:
            the blocks of one stage, or all of them on one device.
        head: `(params.head, x) -> outputs`, any pytree.
    """

    stem: Callable[[Tree, Tree], Tree]
    body: Callable[[Tree, Tree], Tree]
    head: Callable[[Tree, Tree], Tree]

    def boundary(self, stem_params: Tree, inputs: Tree) -> Tree:
        """Shapes and dtypes of `x` for inputs of `[M, microbatch, ...]`."""

        def first(params: Tree, inputs: Tree) -> Tree:
            return self.stem(params, jax.tree.map(lambda a: a[0], inputs))

        return jax.eval_shape(first, stem_params, inputs)
