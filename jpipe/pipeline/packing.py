"""Pytrees of different shapes in vectors of one size.

All stages run one program, and so hold arrays of the same shapes. Where stages differ, in their
parameters, in what they pass on or in what they keep, each lays its own arrays end to end into
vectors, one for each dtype, which are as long as the stage that needs most requires.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
Vectors = dict[str, jax.Array]
"""A vector for each dtype, by the dtype's name."""


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """Where each leaf of several pytrees lies in common vectors.

    Attributes:
        trees: the pytrees, of arrays or of their shapes and dtypes.
    """

    trees: Sequence[Tree]

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the vectors."""
        sizes: dict[str, int] = {}
        for tree in self.trees:
            needed: dict[str, int] = {}
            for leaf in jax.tree.leaves(tree):
                name = jnp.dtype(leaf.dtype).name
                needed[name] = needed.get(name, 0) + math.prod(leaf.shape)
            sizes = {k: max(sizes.get(k, 0), needed.get(k, 0)) for k in sizes | needed}
        return {name: jax.ShapeDtypeStruct((sizes[name],), name) for name in sorted(sizes)}

    def pack(self, index: int, tree: Tree, like: Vectors | None = None) -> Vectors:
        """Lay one tree into vectors, zeros behind it.

        Args:
            index: which of the trees it is like.
            tree: its arrays.
            like: vectors whose dtypes to take where they are not those of the trees.
        """
        shapes = self.shapes
        dtypes = {name: (like or shapes)[name].dtype for name in shapes}
        parts: dict[str, list[jax.Array]] = {name: [] for name in shapes}
        own_leaves = jax.tree.leaves(self.trees[index])
        for own, leaf in zip(own_leaves, jax.tree.leaves(tree), strict=True):
            name = jnp.dtype(own.dtype).name
            parts[name].append(jnp.ravel(leaf).astype(dtypes[name]))
        vectors = {}
        for name, shape in shapes.items():
            rest = shape.size - sum(part.size for part in parts[name])
            vectors[name] = jnp.concatenate([*parts[name], jnp.zeros(rest, dtypes[name])])
        return vectors

    def unpack(self, index: int, vectors: Vectors) -> Tree:
        """Take one tree out of vectors; its arrays have the dtypes of the vectors.

        Args:
            index: which of the trees lies in them.
            vectors: what `pack` made.
        """
        leaves, treedef = jax.tree.flatten(self.trees[index])
        offset = dict.fromkeys(vectors, 0)
        arrays = []
        for leaf in leaves:
            name = jnp.dtype(leaf.dtype).name
            size = math.prod(leaf.shape)
            part = jax.lax.slice_in_dim(vectors[name], offset[name], offset[name] + size)
            arrays.append(part.reshape(leaf.shape))
            offset[name] += size
        return jax.tree.unflatten(treedef, arrays)
