"""What a model must provide to run in a pipeline."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.pipeline.keys import Keys, block_keys
from jpipe.pipeline.per_stage import Chunks, PerStage, map_chunks

Tree = Any
"""A pytree of arrays."""

Body = Callable[..., Any]
"""`(parameters, x) -> x`, or a `Part`."""

Part = Callable[[Tree, Tree, Tree, Any], tuple[Tree, Tree]]
"""`(parameters, state, x, key) -> (y, updates)`: see `Stages.stateful`."""


class Params(NamedTuple):
    """Parameters of a pipelined model, or anything of their structure: gradients, state.

    Attributes:
        stem: of what only the first stage runs.
        body: of the repeated blocks; every leaf has the blocks stacked in its first dim, which
            lies over the mesh's `stage` axis. If the stages differ, a `PerStage` of their
            parameters. If stages have several chunks, `Chunks` of these.
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
            `PerStage` of functions `(params.body[s], x) -> x`, whose shapes may differ too. If
            stages have several chunks, `Chunks` of these.
        head: `(params.head, x) -> outputs`, any pytree.
        stateful: whether the functions have state or draw random numbers. All three then have the
            form `(params, state, x, key) -> (y, updates)`. State lies as parameters do, a `Params`,
            and is not differentiated: running statistics, frozen parameters. The updates are the
            new state, with None in place of what is never changed; they happen once for each
            microbatch, in order. The key is a typed PRNG key, the same in forward and backward, and
            None where none was given; the body gets one for each of its blocks, or, if the stages
            differ, one to fold the number of a block into.
        tie: `(parameters) -> Params` where parts share parameters: copies what is stored once to
            wherever it is used. Gradients of all uses are summed. None if nothing is shared.
        partition: a `PartitionSpec` for each parameter, how it lies over the mesh axes `model` and
            `data`; None for whole everywhere. XLA divides the work accordingly. Together with
            `tie`, that must take specs for parameters, too.
    """

    stem: Callable[..., Any]
    body: Body | PerStage[Body] | Chunks[Body | PerStage[Body]]
    head: Callable[..., Any]
    stateful: bool = False
    tie: Callable[[Params], Params] | None = None
    partition: Params | None = None

    @property
    def parts(self) -> "Parts":
        """The three in their full form."""
        if self.stateful:
            return Parts(self.stem, self.body, self.head)

        def full(body: Any) -> Any:
            if isinstance(body, PerStage):
                return PerStage(*map(_without_state, body))
            return _without_state(body)

        return Parts(
            _without_state(self.stem),
            map_chunks(full, self.body),
            _without_state(self.head),
        )

    def tied(self, params: Params) -> Params:
        """Parameters as the parts use them."""
        return params if self.tie is None else Params(*self.tie(params))

    def tied_back(self, grads: Params, stored: Params) -> Params:
        """Gradients of parameters as the parts use them, to those of parameters as stored."""
        if self.tie is None:
            return grads
        wide = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, jnp.promote_types(a.dtype, jnp.float32)), stored
        )
        (summed,) = jax.linear_transpose(self.tied, wide)(grads)
        return Params(*summed)

    @property
    def tied_partition(self) -> Params | None:
        """The partition of parameters as the parts use them."""
        return self.partition and self.tied(self.partition)


class Parts(NamedTuple):
    """Stem, body and head in their full form, see `Stages.stateful`."""

    stem: Part
    body: Part | PerStage[Part] | Chunks[Part | PerStage[Part]]
    head: Part

    def run_body(
        self, params: Tree, state: Tree, x: Tree, key: jax.Array | None
    ) -> tuple[Tree, Tree]:
        """The whole body on one device."""
        first = 0

        def run_chunk(body: Any, params: Tree, state: Tree) -> Tree:
            nonlocal x, first
            if not isinstance(body, PerStage):
                count = num_blocks(params, state)
                x, new = body(params, state, x, block_keys(key, first, count))
                first += count
                return new
            updates = []
            for run, own, own_state in zip(body, params, state, strict=True):
                x, new = run(own, own_state, x, key)
                updates.append(new)
            return PerStage(*updates)

        updates = map_chunks(run_chunk, self.body, params, state)
        return x, updates

    def run(self, params: Params, state: Params, inputs: Tree, keys: Keys) -> tuple[Tree, Params]:
        """The whole model on one device: outputs of one microbatch, and updates."""
        x, of_stem = self.stem(params.stem, state.stem, inputs, keys.stem)
        x, of_body = self.run_body(params.body, state.body, x, keys.body)
        outputs, of_head = self.head(params.head, state.head, x, keys.head)
        return outputs, Params(of_stem, of_body, of_head)


def _without_state(function: Callable[[Tree, Tree], Tree]) -> Part:
    def part(params: Tree, _: Tree, x: Tree, __: Any) -> tuple[Tree, Tree]:
        return function(params, x), ()

    return part


def num_blocks(params: Tree, state: Tree) -> int:
    """How many blocks are stacked in a body of equal stages."""
    leaves = jax.tree.leaves((params, state))
    return int(leaves[0].shape[0]) if leaves else 0


def no_state(params: Params) -> Params:
    """The state of a model without."""

    def nothing(body: Tree) -> Tree:
        return PerStage(*[()] * len(body)) if isinstance(body, PerStage) else ()

    return Params((), map_chunks(nothing, params.body), ())


def shapes_of(tree: Tree) -> Tree:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), _dtype(a)), tree)


def describe(tree: Tree) -> str:
    """Shapes and dtypes of a pytree in one line."""
    return str(jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree))


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
