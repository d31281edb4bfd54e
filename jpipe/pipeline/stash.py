"""What a stage keeps for later, in buffers of fixed size.

Every stage runs the same program, so all have as many slots as the stage that needs most.
"""

import functools
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
        written, so GPUs do not fill them; CPUs and TPUs fill them with zeros.
    """
    # Where XLA divides arrays over devices, it gives each the whole of one that nothing fills. On
    # TPUs such arrays take more memory: its space is not shared with what comes before.
    mesh = jax.sharding.get_abstract_mesh()
    divided = any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)

    def make(a: Any) -> jax.Array:
        shape = (num_slots, *a.shape)
        zeros, nothing = (functools.partial(f, shape, a.dtype) for f in (jnp.zeros, jax.lax.empty))
        if divided:
            return zeros()
        made: jax.Array = jax.lax.platform_dependent(default=nothing, tpu=zeros)
        return made

    return jax.tree.map(make, contents)


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
