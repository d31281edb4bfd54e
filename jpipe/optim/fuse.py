"""Many arrays as one buffer of equal blocks, so that a step exchanges few messages.

Blocks do not reach from one array into the next: what is in a block has one scale, and the arrays
of a model differ in theirs. The last block of an array is filled up with zeros.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Fused:
    """How arrays lie in a buffer `[num_blocks, block_size]`.

    Attributes:
        shapes: of the arrays.
        block_size: numbers in a block.
        divisor: the number of blocks is a multiple of this.
    """

    shapes: tuple[tuple[int, ...], ...]
    block_size: int
    divisor: int

    @property
    def num_blocks(self) -> int:
        """Blocks in all, those that only fill up included."""
        used = sum(map(self._blocks_of, self.shapes))
        return -(-used // self.divisor) * self.divisor

    @property
    def counts(self) -> np.ndarray:
        """int32 `[num_blocks]`: numbers of an array in each block; what follows is filling."""
        counts = np.zeros(self.num_blocks, np.int32)
        first = 0
        for shape in self.shapes:
            size, blocks = math.prod(shape), self._blocks_of(shape)
            starts = np.arange(blocks) * self.block_size
            counts[first : first + blocks] = np.minimum(size - starts, self.block_size)
            first += blocks
        return counts

    def fuse(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The arrays as one float32 buffer."""
        parts = [
            jnp.pad(a.astype(jnp.float32).ravel(), (0, self._filling(a.shape))) for a in arrays
        ]
        used = sum(part.size for part in parts)
        parts.append(jnp.zeros(self.num_blocks * self.block_size - used, jnp.float32))
        return jnp.concatenate(parts).reshape(self.num_blocks, self.block_size)

    def take_apart(self, buffer: jax.Array) -> list[jax.Array]:
        """The inverse of `fuse`; float32."""
        flat, first, arrays = buffer.ravel(), 0, []
        for shape in self.shapes:
            size = math.prod(shape)
            arrays.append(flat[first : first + size].reshape(shape))
            first += size + self._filling(shape)
        return arrays

    def _blocks_of(self, shape: tuple[int, ...]) -> int:
        return -(-math.prod(shape) // self.block_size)

    def _filling(self, shape: tuple[int, ...]) -> int:
        return self._blocks_of(shape) * self.block_size - math.prod(shape)
