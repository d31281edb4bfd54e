"""What a block is on the wire, and how arrays become blocks."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe.optim.codecs import HalfPrecision, Int8, OneBit
from jpipe.optim.fuse import Fused

BLOCK = 64
CODECS = {
    "bf16": (HalfPrecision(jnp.bfloat16), 2 * BLOCK),
    "fp16": (HalfPrecision(jnp.float16), 2 * BLOCK),
    "int8": (Int8(), BLOCK + 4),
    "onebit": (OneBit(), BLOCK // 8 + 4),
}
FULL = jnp.full(1, BLOCK, jnp.int32)


def there_and_back(codec, values):
    blocks = jnp.asarray(values, jnp.float32).reshape(-1, BLOCK)
    message = codec.encode(blocks, jnp.full(len(blocks), BLOCK, jnp.int32))
    return np.asarray(codec.decode(message, BLOCK))


@pytest.mark.parametrize("name", CODECS)
def test_bytes_of_a_block(name):
    codec, size = CODECS[name]
    message = codec.encode(jnp.ones((3, BLOCK)), jnp.full(3, BLOCK))
    assert message.shape == (3, size)
    assert message.dtype == jnp.uint8


@pytest.mark.parametrize(
    ("name", "largest"), [("bf16", 2.0**-8), ("fp16", 2.0**-11), ("int8", 0.5 / 127)]
)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e4])
def test_errors_are_of_the_last_digit(name, largest, magnitude):
    values = np.random.default_rng(0).normal(size=(5, BLOCK)) * magnitude
    back = there_and_back(CODECS[name][0], values)
    of_what = np.abs(values) if name != "int8" else np.abs(values).max(-1, keepdims=True)
    smallest = 2.0**-25 if name == "fp16" else 0.0  # half a step of its subnormal numbers
    assert (np.abs(back - values) <= 1.01 * largest * of_what + smallest).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e30])
def test_one_bit_keeps_signs_and_the_norm(magnitude):
    values = np.random.default_rng(0).normal(size=(5, BLOCK)) * magnitude
    back = there_and_back(OneBit(), values)
    np.testing.assert_array_equal(np.sign(back), np.sign(values))
    norms = np.linalg.norm(values, axis=-1)
    np.testing.assert_allclose(np.linalg.norm(back.astype(float), axis=-1), norms, rtol=1e-6)


def test_the_sign_of_zero_is_plus():
    back = there_and_back(OneBit(), [0.0, -0.0, -1.0] + [1.0] * (BLOCK - 3))
    assert (back[0, :3] > 0).tolist() == [True, True, False]


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name):
    np.testing.assert_array_equal(there_and_back(CODECS[name][0], np.zeros((2, BLOCK))), 0.0)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_never_looks_sound(name, bad):
    values = np.ones((2, BLOCK))
    values[1, 7] = bad
    back = there_and_back(CODECS[name][0], values)
    assert not np.isfinite(back[1, 7])
    assert np.isfinite(back[0]).all()  # another block is another matter


def test_float16_saturates():
    back = there_and_back(CODECS["fp16"][0], np.linspace(-1e6, 1e6, BLOCK))
    assert back.min() == -65504
    assert back.max() == 65504


SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from([8, 16, 256]), st.integers(1, 8))
def test_fuse_and_take_apart(shapes, block_size, divisor):
    layout = Fused(tuple(shapes), block_size, divisor)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    buffer = layout.fuse(arrays)
    assert buffer.shape == (layout.num_blocks, block_size)
    assert layout.num_blocks % divisor == 0
    for a, b in zip(arrays, layout.take_apart(buffer), strict=True):
        np.testing.assert_array_equal(a, b)
    real = np.arange(block_size) < layout.counts[:, None]
    assert real.sum() == sum(a.size for a in arrays)
    np.testing.assert_array_equal(np.asarray(buffer)[~real], 0.0)
