"""Numbers as fewer bytes: what a block of a fused buffer is on the wire.

A codec turns float32 blocks `[..., block_size]` into bytes `[..., num_bytes]` and back. What is
infinite or not a number never comes back as something that looks sound.
"""

import abc

import jax
import jax.numpy as jnp


class Codec(abc.ABC):
    """Encodes blocks as bytes."""

    @abc.abstractmethod
    def encode(self, blocks: jax.Array, counts: jax.Array) -> jax.Array:
        """Blocks as bytes.

        Args:
            blocks: float32 `[..., block_size]`; zeros from the block's count on.
            counts: int32 `[...]`, how many numbers of each block count.

        Returns:
            uint8 `[..., num_bytes]`.
        """

    @abc.abstractmethod
    def decode(self, message: jax.Array, block_size: int) -> jax.Array:
        """Bytes as float32 blocks; what they hold from a block's count on means nothing."""


class HalfPrecision(Codec):
    """Two bytes a number, as bfloat16 or float16. What float16 cannot hold becomes its largest."""

    def __init__(self, dtype: jax.typing.DTypeLike) -> None:
        self._dtype = dtype

    def encode(self, blocks: jax.Array, counts: jax.Array) -> jax.Array:
        """See `Codec`."""
        largest = float(jnp.finfo(self._dtype).max)
        clipped = jnp.where(jnp.isfinite(blocks), jnp.clip(blocks, -largest, largest), blocks)
        return _as_bytes(clipped.astype(self._dtype))

    def decode(self, message: jax.Array, block_size: int) -> jax.Array:
        """See `Codec`."""
        return _from_bytes(message, self._dtype).astype(jnp.float32)


class Int8(Codec):
    """One byte a number, and a float32 scale a block: its largest number becomes 127."""

    def encode(self, blocks: jax.Array, counts: jax.Array) -> jax.Array:
        """See `Codec`."""
        scale = jnp.abs(blocks).max(-1, keepdims=True) / 127
        steps = jnp.round(blocks / jnp.where(scale == 0, 1, scale))
        # Where the scale is no number, so is what comes back, whatever the bytes.
        steps = jnp.where(jnp.isfinite(steps), jnp.clip(steps, -127, 127), 1).astype(jnp.int8)
        return jnp.concatenate([_as_bytes(steps), _as_bytes(scale)], -1)

    def decode(self, message: jax.Array, block_size: int) -> jax.Array:
        """See `Codec`."""
        steps = jax.lax.bitcast_convert_type(message[..., :block_size], jnp.int8)
        return steps.astype(jnp.float32) * _from_bytes(message[..., block_size:], jnp.float32)


class OneBit(Codec):
    """A sign a number, eight to a byte, and a float32 scale a block.

    The scale is the block's l2 norm over the square root of its size, so that what comes back has
    the norm of what went in (Tang et al., 2021, arXiv 2102.02888). The sign of zero is +1.
    """

    def encode(self, blocks: jax.Array, counts: jax.Array) -> jax.Array:
        """See `Codec`."""
        # Squares of small numbers would be zero, and of large ones infinite.
        largest = jnp.abs(blocks).max(-1, keepdims=True)
        ratios = blocks / jnp.where(largest == 0, 1, largest)
        sizes = jnp.maximum(counts, 1)[..., None].astype(jnp.float32)
        scale = largest * jnp.sqrt(jnp.sum(ratios**2, -1, keepdims=True) / sizes)
        signs = jnp.packbits(blocks >= 0, axis=-1)
        return jnp.concatenate([signs, _as_bytes(scale)], -1)

    def decode(self, message: jax.Array, block_size: int) -> jax.Array:
        """See `Codec`."""
        num_signs = block_size // 8
        positive = jnp.unpackbits(message[..., :num_signs], axis=-1)
        scale = _from_bytes(message[..., num_signs:], jnp.float32)
        return jnp.where(positive > 0, scale, -scale)


def _as_bytes(array: jax.Array) -> jax.Array:
    """`[..., n]` of any dtype as uint8 `[..., n * itemsize]`."""
    found = jax.lax.bitcast_convert_type(array, jnp.uint8)
    return found.reshape(*array.shape[:-1], -1)


def _from_bytes(message: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The inverse of `_as_bytes`."""
    size = jnp.dtype(dtype).itemsize
    grouped = message.reshape(*message.shape[:-1], -1, *([size] if size > 1 else []))
    return jax.lax.bitcast_convert_type(grouped, dtype)
