"""Checksums of arrays: CRC32, as `zlib.crc32` has it, on the host and on the device.

On the device the checksum of n words takes two passes, and in each all words are worked on at the
same time. A CRC is linear: it is the remainder of a polynomial over the field of two elements, so
words can be multiplied by the powers of x that stand for their places, in any order, and added
(XORed). Here words are laid out in rows; the first pass adds up the rows, the second the columns.
See Ross N. Williams, "A Painless Guide to CRC Error Detection Algorithms", 1993, and for
the powers of x `crc32_combine` of zlib.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Tree = Any

_POLYNOMIAL = 0xEDB88320  # without x^32; the highest bit of a word is the coefficient of 1
_ONE, _X = 1 << 31, 1 << 30


def crc32_of(array: Any) -> int:
    """CRC32 of an array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


def device_crc32(tree: Tree) -> jax.Array:
    """CRC32 of a pytree of arrays, computed where they are.

    Args:
        tree: pytree of arrays of numbers or booleans, of any shapes; traced or not.

    Returns:
        uint32 scalar, equal to `zlib.crc32` of the leaves' bytes, one leaf after the other, each in
        C order and little-endian.

    Raises:
        ValueError: if a leaf is a key, has elements of less than a byte, or is an array of NumPy's
            that JAX would narrow.
    """
    remainder, count = jnp.uint32(0), 0
    for leaf in jax.tree.leaves(tree):
        array = _checked(leaf)
        size = array.size * array.dtype.itemsize
        if size:
            remainder = _times(remainder, _power(8 * size)) ^ _remainder(_words(array))
        count += size
    # What remains of the ones that a CRC begins with depends on the number of bytes alone.
    return remainder ^ np.uint32(_product(0xFFFFFFFF, _power(8 * count)) ^ 0xFFFFFFFF)


def _checked(leaf: Any) -> jax.Array:
    """The leaf as a device holds it, if that is as it is given, in whole bytes."""
    array = jnp.asarray(leaf)
    if getattr(leaf, "dtype", array.dtype) != array.dtype:
        raise ValueError(f"a leaf of dtype {leaf.dtype} would become {array.dtype} on a device")
    numbers = array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, jnp.number)
    if not numbers or jax.dtypes.itemsize_bits(array.dtype) < 8:
        raise ValueError(f"a leaf of dtype {array.dtype} has no bytes of which to take a CRC32")
    return array


def _words(array: jax.Array) -> jax.Array:
    """The bytes as little-endian uint32, with zeros before them to fill the first: they add 0."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    size = array.dtype.itemsize
    if size >= 4:
        return jax.lax.bitcast_convert_type(array.reshape(-1), jnp.uint32).reshape(-1)
    parts = jax.lax.bitcast_convert_type(array.reshape(-1), jnp.dtype(f"uint{8 * size}"))
    filled = jnp.pad(parts, (-parts.size % (4 // size), 0)).reshape(-1, 4 // size)
    return jax.lax.bitcast_convert_type(filled, jnp.uint32)


def _remainder(words: jax.Array) -> jax.Array:
    """The remainder of uint32 words, in the order of their bytes, times x^32."""
    width = 1 << ((words.size - 1).bit_length() + 1) // 2
    height = -(-words.size // width)
    rows = jnp.pad(words, (height * width - words.size, 0)).reshape(height, width)
    sums = _sum(_times_each(rows, _places(height, 32 * width)[:, :, None]))
    return _times(_sum(_times_each(sums, _places(width, 32))), _power(32))


def _sum(words: jax.Array) -> jax.Array:
    return jax.lax.reduce(words, np.uint32(0), jax.lax.bitwise_xor, (0,))


def _times_each(words: jax.Array, columns: NDArray[np.uint32]) -> jax.Array:
    """Words times polynomials, each given as its products with the 32 bits of a word."""
    product = jnp.zeros_like(words)
    for bit, column in enumerate(columns):
        # All ones where the bit is set, else 0.
        mask = -((words >> np.uint32(bit)) & np.uint32(1))
        product ^= mask & column
    return product


def _times(word: jax.Array, polynomial: int) -> jax.Array:
    return _times_each(word[None], _columns([polynomial]))[0]


@functools.lru_cache(maxsize=32)
def _places(count: int, step: int) -> NDArray[np.uint32]:
    """The powers of x that stand for `count` places, the last one being 1, as columns."""
    powers, factor = [_ONE], _power(step)
    while len(powers) < count:
        powers.append(_product(powers[-1], factor))
    return _columns(powers[::-1])


def _columns(polynomials: Sequence[int]) -> NDArray[np.uint32]:
    """uint32 `[32, n]`: each polynomial times each bit of a word."""
    columns = [np.array(polynomials, np.uint32)]  # the highest bit stands for 1, the next for x
    while len(columns) < 32:
        last = columns[-1]
        odd = (last & np.uint32(1)).astype(bool)
        columns.append((last >> np.uint32(1)) ^ np.where(odd, np.uint32(_POLYNOMIAL), np.uint32(0)))
    return np.stack(columns[::-1])


def _power(exponent: int) -> int:
    """The remainder of x to this power."""
    result, square = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square, exponent = _product(square, square), exponent >> 1
    return result


def _product(a: int, b: int) -> int:
    """The remainder of the product of two remainders."""
    product = 0
    for k in range(31, -1, -1):
        if a >> k & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
