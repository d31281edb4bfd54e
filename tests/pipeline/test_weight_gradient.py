"""The backward cut in two: the same numbers, and the same work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpipe.adapters.split import flops
from jpipe.models import GPTConfig
from jpipe.models.gpt import Block
from jpipe.pipeline import repeat_block
from jpipe.pipeline.residuals import split_gradient
from jpipe.pipeline.weight_gradient import split_backward

CONFIG = GPTConfig(width=32, heads=4, context=16)
SIZE = 3


def gpt_blocks(recompute="none", count=2, config=CONFIG):
    """The function of a stage, its parameters and an input."""
    blocks = [nnx.split(Block(config, rngs=nnx.Rngs(k))) for k in range(count)]
    params = jax.tree.map(lambda *a: jnp.stack(a), *(state for _, state in blocks))
    body = repeat_block(lambda p, x: nnx.merge(blocks[0][0], p)(x), recompute)
    x = jax.random.normal(jax.random.key(1), (SIZE, config.context, config.width))
    return body, params, x


def convolution():
    def body(params, x):
        y = jax.lax.conv_general_dilated(
            x, params["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(y - y.mean((0, 1, 2))) * params["scale"] + x

    params = {"w": jax.random.normal(jax.random.key(0), (3, 3, 8, 8)) / 8, "scale": jnp.ones(8)}
    return body, params, jax.random.normal(jax.random.key(1), (2, 6, 6, 8))


def loop():
    """One operation makes both gradients."""

    def body(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]

    params = jax.random.normal(jax.random.key(0), (3, 8, 8)) / 3
    return body, params, jax.random.normal(jax.random.key(1), (4, 8))


def no_parameters():
    return lambda _, x: jnp.sin(x), (), jnp.arange(6.0)


def no_input_gradient():
    return lambda p, x: p * jax.lax.stop_gradient(x), jnp.float32(2), jnp.arange(6.0)


MODELS = {
    "gpt": gpt_blocks,
    "gpt, block again": lambda: gpt_blocks("block"),
    "gpt, stage again": lambda: gpt_blocks("stage"),
    "convolution": convolution,
    "loop": loop,
    "no parameters": no_parameters,
    "no input gradient": no_input_gradient,
}


def cut(body, params, x):
    split = split_gradient(lambda p, _, x, __: (body(p, x), ()), params, (), x, ())
    return split, split_backward(split, params, (), jax.eval_shape(body, params, x))


def size(arrays):
    return sum(a.size for a in arrays)


@pytest.mark.parametrize("name", MODELS)
def test_both_halves_make_what_the_whole_makes(name):
    body, params, x = MODELS[name]()
    split, halves = cut(body, params, x)
    y, _, kept = jax.jit(split.forward)(params, (), x, ())
    dy = jax.random.normal(jax.random.key(2), y.shape)
    dparams, dx = jax.jit(split.backward)(params, (), kept, dy)
    own_dx, left = jax.jit(halves.inputs)(params, (), kept, dy)
    own_dparams = jax.jit(halves.weights)(params, (), kept, left)
    assert [(a.shape, a.dtype) for a in left] == [(a.shape, a.dtype) for a in halves.left]
    for a, b in zip(
        jax.tree.leaves((own_dparams, own_dx)), jax.tree.leaves((dparams, dx)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize("recompute", ["none", "block", "stage"])
def test_together_they_take_the_operations_of_the_whole(recompute):
    """Within 2%: what is computed again are elementwise operations."""
    config = GPTConfig(width=128, heads=4, context=64)
    body, params, x = gpt_blocks(recompute, count=1, config=config)
    split, halves = cut(body, params, x)

    def operations(function, *arguments):
        return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]

    whole = operations(split.backward, params, (), split.kept, x)
    first = operations(halves.inputs, params, (), split.kept, x)
    second = operations(halves.weights, params, (), split.kept, halves.left)
    assert first + second == pytest.approx(whole, rel=0.02)
    assert second > 0.2 * whole


def test_the_second_half_multiplies_once_for_each_weight():
    body, params, x = gpt_blocks(count=1)
    split, halves = cut(body, params, x)
    program = jax.make_jaxpr(halves.weights)(params, (), split.kept, halves.left)
    products = [e for e in program.eqns if e.primitive.name == "dot_general"]
    assert len(products) == sum(a.ndim == 3 for a in jax.tree.leaves(params))


def test_what_is_left_is_what_enters_each_product():
    """Of a GPT block: the gradients of the outputs of its four products and its norms."""
    body, params, x = gpt_blocks(count=1)
    _, halves = cut(body, params, x)
    assert size(halves.left) / x.size < 12
    body, params, x = gpt_blocks("stage", count=1)
    split, again = cut(body, params, x)
    assert size(split.kept) == x.size
    assert size(halves.left) < size(again.left) < size(halves.left) + 16 * x.size


def test_effects_of_the_backward_happen_once(capfd):
    @jax.custom_vjp
    def noted(x):
        return x

    def backward(_, g):
        jax.debug.print("passing {}", g.shape[0])
        return (g,)

    noted.defvjp(lambda x: (x, None), backward)
    body, params, x = (lambda p, x: noted(x @ p)), jnp.eye(3), jnp.ones((2, 3))
    split, halves = cut(body, params, x)
    _, _, kept = split.forward(params, (), x, ())
    _, left = jax.jit(halves.inputs)(params, (), kept, x)
    jax.block_until_ready(jax.jit(halves.weights)(params, (), kept, left))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("passing 2") == 1


def test_an_operation_that_makes_both_belongs_to_the_first_half():
    body, params, x = loop()
    split, halves = cut(body, params, x)
    assert size(halves.left) == params.size
    assert flops(halves.weights, params, (), split.kept, halves.left) == 0
