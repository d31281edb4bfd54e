"""What a block may contain."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from parity import models
from pipeline.variants import SIZE, D, M, P, assert_parity, model

from jpipe.schedule import SCHEDULES

KEY = 3  # of jax.random.key, made inside: nothing runs while tests are collected
TABLE = np.linspace(-1, 1, D, dtype=np.float32)
ORDER = np.array([1, 0, 3, 2, 7, 6, 4, 5])


@jax.custom_vjp
def doubled_gradient(x, w):
    return jnp.sin(x) @ w


doubled_gradient.defvjp(
    lambda x, w: (doubled_gradient(x, w), (jnp.cos(x), jnp.sin(x), w)),
    lambda kept, g: (2 * (g @ kept[2].T) * kept[0], kept[1].T @ g),
)


def convolution(p, x):
    kernel = p["w"][:3, :1, None]
    dims = ("NWC", "WIO", "NWC")
    y = jax.lax.conv_general_dilated(x[:, :, None], kernel, (1,), "SAME", dimension_numbers=dims)
    return x + y[:, :, 0] + p["b"]


def indexing(p, x):
    h = (x @ p["w"])[:, ORDER]
    h = h + jnp.take_along_axis(x, jnp.argsort(x, axis=-1), axis=-1) + jnp.sort(h, axis=-1)
    top, where = jax.lax.top_k(x, 3)
    h = h.at[jnp.arange(SIZE)[:, None], where].add(top)
    return h + jax.lax.dynamic_slice(x @ p["w"], (0, jnp.argmax(x[0]) % 4), (SIZE, 4)).sum()


def reductions(p, x):
    h = jnp.cumsum(x @ p["w"], axis=-1) * 0.1 + jnp.cumprod(jnp.tanh(x), axis=-1)
    h = jax.lax.associative_scan(jnp.add, h, axis=1) + jnp.max(x, axis=-1, keepdims=True)
    return h + jax.nn.logsumexp(x * p["b"], axis=-1, keepdims=True) + jax.nn.softmax(x)


def control_flow(p, x):
    x = jax.lax.cond(x.sum() > 0, lambda x: x @ p["w"], lambda x: x * p["b"] + jnp.sin(x), x)
    x = jax.lax.switch(jnp.argmax(x[0]) % 2, [lambda x: x + p["b"], jnp.sin], x)
    x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["w"]), x)
    x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ p["w"] + w), None), x, p["w"])
    stopped = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] / 2), (0, x))[1]
    return jax.lax.map(lambda row: jnp.tanh(row @ p["w"]), x) + jax.lax.stop_gradient(stopped)


def randomness(p, x):
    key = jax.random.key(KEY)
    noise = jax.random.normal(jax.random.fold_in(key, jnp.argmax(x)), x.shape)
    return x + jnp.where(jax.random.bernoulli(key, 0.7, x.shape), noise * jnp.tanh(x @ p["w"]), 0)


def activations(p, x):
    h = x @ p["w"]
    return jnp.where(h > 0, jax.nn.gelu(h), jax.nn.relu(x) + jax.nn.silu(h)) + jax.nn.softplus(x)


BLOCKS = {
    "convolution": convolution,
    "indexing": indexing,
    "reductions": reductions,
    "control flow": control_flow,
    "randomness": randomness,
    "activations": activations,
    "custom_vjp": lambda p, x: doubled_gradient(x, p["w"]) + p["b"],
    "jit in jit": lambda p, x: jax.jit(lambda x, w: x + jax.jit(jnp.tanh)(x @ w))(x, p["w"]),
    "vmap and einsum": lambda p, x: jax.vmap(lambda r: jnp.einsum("i,ij->j", r, p["w"]))(x),
    "linear solve": lambda p, x: jnp.linalg.solve(3 * jnp.eye(D) + 0.1 * p["w"], x.T).T,
    "constants": lambda p, x: x * TABLE + jnp.tanh(x @ p["w"] + jnp.asarray(TABLE)),
    "callback": lambda p, x: (
        x @ p["w"]
        + jax.lax.stop_gradient(
            jax.pure_callback(lambda a: 2 * np.asarray(a), x, jax.lax.stop_gradient(x))
        )
    ),
    "barrier": lambda p, x: jax.lax.optimization_barrier(jnp.tanh(x @ p["w"])),
    "nothing": lambda p, x: x,
    "no input": lambda p, x: jnp.zeros_like(x) + p["b"],
}


@pytest.mark.parametrize(
    ("name", "schedule"), list(zip(BLOCKS, itertools.cycle(SCHEDULES), strict=False))
)
def test_blocks(name, schedule):
    assert_parity(model(block=BLOCKS[name]), schedule)


@pytest.mark.parametrize("name", ["indexing", "control flow", "randomness", "custom_vjp"])
def test_blocks_computed_again(name):
    # prevent_cse=True, the default, puts barriers into the program.
    assert_parity(model(block=jax.checkpoint(BLOCKS[name])))


@pytest.mark.parametrize(
    "policy",
    [
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("h"),
    ],
    ids=["everything", "dots", "names"],
)
def test_checkpoint_policies(policy):
    def block(p, x):
        return x + jnp.tanh(checkpoint_name(jnp.sin(x @ p["w"]), "h") + p["b"])

    assert_parity(model(block=jax.checkpoint(block, policy=policy)))


def test_a_body_that_scans_over_its_blocks():
    def body(blocks, x):
        return jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"] + p["b"]), None), x, blocks)[0]

    eight = models.mlp(2 * P, M, size=SIZE, width=D)
    assert_parity(eight._replace(stages=dataclasses.replace(eight.stages, body=body)))
