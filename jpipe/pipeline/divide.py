"""How XLA is to divide a microbatch over the mesh axis `data`, where it does.

Left to itself XLA may divide anything anywhere: features of a layer whose parameters lie over
`data`, or the vectors of `packing`, whose taking apart would then move data between devices. So
examples are said to lie over `data` wherever activations pass from one part to the next.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.mesh import DATA

Tree = Any


def divided_examples(batch: Tree) -> int | None:
    """How many examples of a microbatch XLA divides over `data`; None where it does not.

    Args:
        batch: pytree of `[M, microbatch, ...]` arrays.
    """
    divided = DATA in jax.sharding.get_abstract_mesh().auto_axes
    return int(jax.tree.leaves(batch)[0].shape[1]) if divided else None


def in_rows(leaf: Any, rows: int | None) -> bool:
    """Whether an array has the examples, or so many parts of each, in its first dim."""
    # What has one dim only is more often a statistic of as many features as there are examples.
    many = len(leaf.shape) > 1 and leaf.shape[0] > 0
    return bool(rows and many and leaf.shape[0] % rows == 0)


def divide(tree: Tree, rows: int | None) -> Tree:
    """Say that activations lie over `data` by their examples.

    Args:
        tree: pytree of arrays.
        rows: what `divided_examples` found.
    """
    if not rows:
        return tree
    return jax.tree.map(lambda a: place(a, DATA) if in_rows(a, rows) else a, tree)


def place(array: jax.Array, *names: str | None) -> jax.Array:
    """Say that an array lies over these axes by its first dims, where XLA divides the work."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.auto_axes:
        return array
    spec = PartitionSpec(*(name if name in mesh.auto_axes else None for name in names))
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
