"""Random keys that depend on what draws, never on where or when it runs.

The key of a block is a function of the step's key, the microbatch and the number of the block in
the model: the same in forward and backward, on every mesh, in every schedule.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Keys(NamedTuple):
    """Keys of one microbatch, each a typed PRNG key, or None if the step has none."""

    stem: jax.Array | None
    body: jax.Array | None
    head: jax.Array | None


def microbatch_keys(key: jax.Array | None, microbatch: jax.Array | int) -> Keys:
    """The keys of a microbatch.

    Args:
        key: the key of the step, or None.
        microbatch: its number in the step.
    """
    if key is None:
        return Keys(None, None, None)
    return Keys(*jax.random.split(jax.random.fold_in(key, microbatch), 3))


def block_keys(key: jax.Array | None, first: jax.Array | int, count: int) -> jax.Array | None:
    """A key for each of several blocks.

    Args:
        key: the body's key, or None.
        first: the number of the first block in the model.
        count: how many blocks.
    """
    if key is None:
        return None
    return jax.vmap(lambda k: jax.random.fold_in(key, k))(first + jnp.arange(count))
