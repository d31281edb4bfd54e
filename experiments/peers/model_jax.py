"""The GPT as pure JAX functions, the same for all JAX contenders: it knows no pipeline library.

Shapes: B examples, S tokens, D width, H heads, K = D / H, V vocabulary, T = B * S. Matrices are
multiplied as `[T, D] @ [D, E]`: XLA on the CPU is slow at the same product with three dimensions in
a program that holds both forward and backward, which would flatter whoever splits the program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def stem(params: Tree, tokens_BS: jax.Array) -> jax.Array:
    """Embed int `[B, S]` tokens to float `[B, S, D]`."""
    return params["token"][tokens_BS] + params["position"]


def make_block(heads: int) -> Callable[[Tree, jax.Array], jax.Array]:
    """The block `(parameters, [B, S, D]) -> [B, S, D]`."""

    def block(params: Tree, x_BSD: jax.Array) -> jax.Array:
        B, S, D = x_BSD.shape
        x_TD = x_BSD.reshape(B * S, D)
        qkv_TE = _linear(params, "qkv", _norm(x_TD, params["norm1_scale"], params["norm1_bias"]))
        q_BHSK, k_BHSK, v_BHSK = qkv_TE.reshape(B, S, 3, heads, -1).transpose(2, 0, 3, 1, 4)
        scores_BHSS = jnp.einsum("bhqk,bhsk->bhqs", q_BHSK, k_BHSK) * (D // heads) ** -0.5
        causal_SS = jnp.tril(jnp.ones((S, S), bool))
        scores_BHSS = jnp.where(causal_SS, scores_BHSS, jnp.finfo(scores_BHSS.dtype).min)
        mixed_BHSK = jnp.einsum("bhqs,bhsk->bhqk", jax.nn.softmax(scores_BHSS), v_BHSK)
        x_TD += _linear(params, "out", mixed_BHSK.transpose(0, 2, 1, 3).reshape(B * S, D))
        up_TE = _linear(params, "up", _norm(x_TD, params["norm2_scale"], params["norm2_bias"]))
        return (x_TD + _linear(params, "down", jax.nn.gelu(up_TE))).reshape(B, S, D)

    return block


def repeat(block: Callable[[Tree, jax.Array], jax.Array]) -> Callable[[Tree, jax.Array], jax.Array]:
    """All blocks of stacked parameters in turn, unrolled."""

    def body(blocks: Tree, x_BSD: jax.Array) -> jax.Array:
        for k in range(jax.tree.leaves(blocks)[0].shape[0]):
            x_BSD = block(jax.tree.map(lambda leaf, k=k: leaf[k], blocks), x_BSD)
        return x_BSD

    return body


def head(params: Tree, x_BSD: jax.Array) -> jax.Array:
    """Map float `[B, S, D]` to logits `[B, S, V]`."""
    B, S, D = x_BSD.shape
    x_TD = _norm(x_BSD.reshape(B * S, D), params["norm_scale"], params["norm_bias"])
    return (x_TD @ params["project_w"]).reshape(B, S, -1)


def next_token_loss(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per token."""
    of_target = jnp.take_along_axis(logits_BSV, targets_BS[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits_BSV, axis=-1) - of_target)


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def _linear(params: Tree, name: str, x_TD: jax.Array) -> jax.Array:
    return x_TD @ params[f"{name}_w"] + params[f"{name}_b"]
