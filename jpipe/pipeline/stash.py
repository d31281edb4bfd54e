"""What a stage keeps for later, in buffers of fixed size.

Every stage runs the same program, so all have as many slots as the stage that needs most.
"""

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def empty(num_slots: int, contents: Tree) -> Tree:
    """Buffers for `num_slots` times the contents.

    Args:
        num_slots: number of slots.
        contents: pytree of arrays, or of their shapes and dtypes.

    Returns:
        The same pytree with a leading dim of `num_slots`. Nothing comes of a slot before it is
        written, so GPUs and TPUs do not fill them; CPUs fill them with zeros.
    """
    # Where XLA divides arrays over devices, it gives each the whole of one that nothing fills.
    mesh = jax.sharding.get_abstract_mesh()
    divided = any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)
    make = jnp.zeros if divided else jax.lax.empty
    return jax.tree.map(lambda a: make((num_slots, *a.shape), a.dtype), contents)


def write(buffers: Tree, slot: jax.Array | int, contents: Tree) -> Tree:
    """The buffers with one slot replaced."""

    def replace(buffer: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(buffer, value, slot, 0)

    return jax.tree.map(replace, buffers, contents)


def read(buffers: Tree, slot: jax.Array | int) -> Tree:
    """The contents of one slot; also one microbatch of `[M, ...]` arrays."""
    return jax.tree.map(
        lambda buffer: jax.lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False), buffers
    )
