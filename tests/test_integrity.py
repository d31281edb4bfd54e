"""The device's CRC32 is zlib's."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe.integrity import crc32_of, device_crc32

DTYPES = ["float32", "float16", "bfloat16", "int8", "uint16", "int32", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (5, 7), (2, 3, 4, 5), (40_000,)])
def test_equals_zlib(dtype, shape):
    random = np.random.default_rng(0)
    values = random.normal(size=shape) * 50
    array = jnp.asarray(values > 0 if dtype == "bool" else values, jnp.dtype(dtype))
    assert int(jax.jit(device_crc32)(array)) == zlib.crc32(np.asarray(array).tobytes())
    assert crc32_of(array) == zlib.crc32(np.asarray(array).tobytes())


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(data):
    assert int(device_crc32(np.frombuffer(data, np.uint8))) == zlib.crc32(data)


def test_leaves_one_after_the_other():
    tree = {"a": jnp.arange(3), "b": [jnp.ones(5, jnp.bfloat16), jnp.zeros(0), jnp.int8(-1)]}
    data = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    assert int(device_crc32(tree)) == zlib.crc32(data)
    assert int(device_crc32(())) == zlib.crc32(b"") == 0


def test_numbers_that_are_none():
    array = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    array[:1].view(np.uint32)[0] |= 12345  # what a NaN carries with it
    assert int(jax.jit(device_crc32)(array)) == zlib.crc32(array.tobytes())


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (np.ones(3), "float64 would become float32"),
        (jnp.ones(3, jnp.int4), "int4 has no bytes"),
        (jax.random.key(0), "key<fry> has no bytes"),
    ],
)
def test_refuses(leaf, said):
    with pytest.raises(ValueError, match=said):
        device_crc32([jnp.ones(2), leaf])


@pytest.mark.parametrize("size", [1, 33, 4096])
def test_every_flipped_bit_shows(size):
    array = np.random.default_rng(size).integers(0, 2**32, size, np.uint32)
    right, crc = zlib.crc32(array.tobytes()), jax.jit(device_crc32)
    for bit in np.random.default_rng(1).choice(32 * size, min(32, 32 * size), replace=False):
        flipped = array.copy()
        flipped[bit // 32] ^= np.uint32(1 << (bit % 32))
        found = int(crc(flipped))
        assert found == zlib.crc32(flipped.tobytes())
        assert found != right


def test_float64():
    with jax.enable_x64(True):
        array = jnp.linspace(0, 1, 77)
        assert array.dtype == jnp.float64
        assert int(device_crc32(array)) == zlib.crc32(np.asarray(array).tobytes())
