"""Bring parameters that are stored in shares to the stages that own them, and gradients back.

Every stage stores an equal share of every parameter. What stage r stores of the parameters that
stage s owns goes from r to s: one all-to-all for each dtype, however many parameters there are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jpipe.mesh import STAGE
from jpipe.pipeline.packing import Packing, Vectors
from jpipe.pipeline.per_stage import PerStage

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Owners:
    """Who owns what, and how it is stored; to be used where the `stage` axis is manual.

    Attributes:
        shares: what this device stores of each stage's parameters, or their shapes and dtypes.
        specs: how the parameters are stored: over `stage` by one dim, or whole everywhere.
    """

    shares: PerStage[Tree]
    specs: PerStage[Tree]

    def bring(self, shares: PerStage[Tree]) -> Vectors:
        """The parameters that this stage owns, packed."""
        arrived = self._exchange(
            [self._sent.pack(s, self._shared(own, s)) for s, own in enumerate(shares)]
        )

        def of_stage(s: int) -> Callable[[Vectors], Vectors]:
            def join(arrived: Vectors) -> Vectors:
                parts = [
                    jax.tree.leaves(self._sent.unpack(s, _row(arrived, r)))
                    for r in range(len(shares))
                ]
                pieces = iter(zip(*parts, strict=True))
                leaves, treedef = jax.tree.flatten(shares[s])
                whole = [
                    leaf if dim is None else jnp.concatenate(next(pieces), axis=dim)
                    for leaf, dim in zip(leaves, self._dims(s), strict=True)
                ]
                return self.whole.pack(s, jax.tree.unflatten(treedef, whole))

            return join

        return self._switch([of_stage(s) for s in range(len(shares))], arrived)

    def share_out(self, packed: Vectors) -> PerStage[Tree]:
        """Gradients of this stage's own parameters, packed, to shares of those of all stages."""
        num_stages = len(self.shares)

        def of_stage(s: int) -> Callable[[Vectors], tuple[list[Vectors], list[list[jax.Array]]]]:
            def cut(packed: Vectors) -> tuple[list[Vectors], list[list[jax.Array]]]:
                leaves = jax.tree.leaves(self.whole.unpack(s, packed))
                dims = self._dims(s)
                rows = []
                for r in range(num_stages):
                    mine = [
                        jnp.split(leaf, num_stages, axis=dim)[r]
                        for leaf, dim in zip(leaves, dims, strict=True)
                        if dim is not None
                    ]
                    rows.append(self._sent.pack(s, mine, like=packed))
                kept = [leaf for leaf, dim in zip(leaves, dims, strict=True) if dim is None]
                others = [self._unshared_zeros(r, packed) for r in range(num_stages)]
                return rows, [kept if r == s else others[r] for r in range(num_stages)]

            return cut

        rows, unshared = self._switch([of_stage(s) for s in range(num_stages)], packed)
        arrived, unshared = self._exchange(rows), jax.lax.psum(unshared, STAGE)
        trees = []
        for s in range(num_stages):
            pieces = iter(jax.tree.leaves(self._sent.unpack(s, _row(arrived, s))))
            rest = iter(unshared[s])
            grads = [next(rest) if dim is None else next(pieces) for dim in self._dims(s)]
            trees.append(jax.tree.unflatten(jax.tree.structure(self.shares[s]), grads))
        return PerStage(*trees)

    @property
    def whole(self) -> Packing:
        """How each stage's whole parameters are packed."""
        return Packing([self._whole_shapes(s) for s in range(len(self.shares))])

    @property
    def _sent(self) -> Packing:
        """How the shares of each stage's parameters are packed to travel."""
        return Packing([self._shared(own, s) for s, own in enumerate(self.shares)])

    def _dims(self, stage: int) -> list[int | None]:
        """By which dim each parameter of a stage is shared; None for those that are not."""

        def dim(spec: PartitionSpec) -> int | None:
            return spec.index(STAGE) if STAGE in spec else None

        return [dim(spec) for spec in jax.tree.leaves(self.specs[stage])]

    def _shared(self, tree: Tree, stage: int) -> list[Any]:
        pairs = zip(jax.tree.leaves(tree), self._dims(stage), strict=True)
        return [leaf for leaf, dim in pairs if dim is not None]

    def _whole_shapes(self, stage: int) -> Tree:
        leaves, treedef = jax.tree.flatten(self.shares[stage])

        def whole(leaf: Any, dim: int | None) -> jax.ShapeDtypeStruct:
            shape = list(leaf.shape)
            if dim is not None:
                shape[dim] *= len(self.shares)
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        return jax.tree.unflatten(treedef, map(whole, leaves, self._dims(stage)))

    def _unshared_zeros(self, stage: int, like: Vectors) -> list[jax.Array]:
        pairs = zip(jax.tree.leaves(self.shares[stage]), self._dims(stage), strict=True)
        return [
            jnp.zeros(leaf.shape, like[jnp.dtype(leaf.dtype).name].dtype)
            for leaf, dim in pairs
            if dim is None
        ]

    def _exchange(self, rows: list[Vectors]) -> Vectors:
        """Send row s to stage s; row r of the result came from stage r."""
        stacked = jax.tree.map(lambda *vectors: jnp.stack(vectors), *rows)
        return jax.tree.map(
            lambda rows: jax.lax.all_to_all(rows, STAGE, split_axis=0, concat_axis=0), stacked
        )

    def _switch(self, branches: list[Callable[..., Any]], *operands: Any) -> Any:
        return jax.lax.switch(jax.lax.axis_index(STAGE), branches, *operands)


def _row(stacked: Vectors, index: int) -> Vectors:
    return {name: rows[index] for name, rows in stacked.items()}
