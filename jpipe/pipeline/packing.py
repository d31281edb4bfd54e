"""Pytrees of different shapes in vectors of one size.

All stages run one program, and so hold arrays of the same shapes. Where stages differ, in their
parameters, in what they pass on or in what they keep, each lays its own arrays end to end into
vectors, one for each dtype, which are as long as the stage that needs most requires.

Where XLA divides the work over a mesh axis, these vectors are whole everywhere, except that arrays
of one microbatch are laid side by side, a row for each example, and the rows divided over `data`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.mesh import DATA
from jpipe.pipeline.divide import in_rows, place

Tree = Any
Vectors = dict[str, jax.Array]
"""Vectors by dtype, and matrices for what lies in rows."""

_ROWS = "_rows"


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """Where each leaf of several pytrees lies in common vectors.

    Attributes:
        trees: the pytrees, of arrays or of their shapes and dtypes.
        rows: the number of examples; arrays of two and more dims whose first is a multiple of it
            are laid in rows. None to lay all end to end.
    """

    trees: Sequence[Tree]
    rows: int | None = None

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the vectors."""
        sizes: dict[str, int] = {}
        for tree in self.trees:
            needed: dict[str, int] = {}
            for leaf in jax.tree.leaves(tree):
                name = self._name(leaf)
                needed[name] = needed.get(name, 0) + self._width(leaf)
            sizes = {k: max(sizes.get(k, 0), needed.get(k, 0)) for k in sizes | needed}
        return {name: self._shape(name, sizes[name]) for name in sorted(sizes)}

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
            name = self._name(own)
            shape = self._shape(name, self._width(own)).shape
            parts[name].append(jnp.reshape(leaf, shape).astype(dtypes[name]))
        vectors = {}
        for name, shape in shapes.items():
            rest = shape.shape[-1] - sum(part.shape[-1] for part in parts[name])
            zeros = jnp.zeros((*shape.shape[:-1], rest), dtypes[name])
            vectors[name] = _pin(jnp.concatenate([*parts[name], zeros], axis=-1))
        return vectors

    def unpack(self, index: int, vectors: Vectors) -> Tree:
        """Take one tree out of vectors; its arrays have the dtypes of the vectors.

        Args:
            index: which of the trees lies in them.
            vectors: what `pack` made.
        """
        leaves, treedef = jax.tree.flatten(self.trees[index])
        vectors = jax.tree.map(_pin, vectors)
        offset = dict.fromkeys(vectors, 0)
        arrays = []
        for leaf in leaves:
            name, size = self._name(leaf), self._width(leaf)
            start, offset[name] = offset[name], offset[name] + size
            part = jax.lax.slice_in_dim(vectors[name], start, start + size, axis=-1)
            arrays.append(part.reshape(leaf.shape))
        return jax.tree.unflatten(treedef, arrays)

    @property
    def shape_list(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes in the order of their names."""
        return list(self.shapes.values())

    def pack_list(self, index: int, tree: Tree) -> list[jax.Array]:
        """The same as `pack`, as a list in the order of names."""
        return list(self.pack(index, tree).values())

    def unpack_list(self, index: int, vectors: Sequence[jax.Array]) -> Tree:
        """The inverse."""
        return self.unpack(index, dict(zip(self.shapes, vectors, strict=True)))

    def _in_rows(self, leaf: Any) -> bool:
        return in_rows(leaf, self.rows)

    def _name(self, leaf: Any) -> str:
        return jnp.dtype(leaf.dtype).name + (_ROWS if self._in_rows(leaf) else "")

    def _width(self, leaf: Any) -> int:
        size = math.prod(leaf.shape)
        return size // self.rows if self.rows and self._in_rows(leaf) else size

    def _shape(self, name: str, width: int) -> jax.ShapeDtypeStruct:
        if not name.endswith(_ROWS):
            return jax.ShapeDtypeStruct((width,), name)
        assert self.rows is not None
        return jax.ShapeDtypeStruct((self.rows, width), name.removesuffix(_ROWS))


def _pin(vector: jax.Array) -> jax.Array:
    """Divide rows over `data`, and nothing else, where XLA divides the work."""
    return place(vector, DATA if vector.ndim > 1 else None)
