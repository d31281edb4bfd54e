"""A GPT in flax.nnx, written as any Flax user would write it: it knows nothing of pipelines.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: pre-norm blocks,
causal self-attention, GELU, learned positions.

Shapes: B examples, S tokens, D width, H heads, K = D / H, V vocabulary, T = B * S. Matrices are
multiplied as `[T, D] @ [D, E]`: XLA on the CPU is slow at the same product with three dimensions.

Over a mesh axis `model` heads and the inner features of an MLP are divided (Shoeybi et al.,
"Megatron-LM", 2019, arXiv 1909.08053).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpipe.precision import POLICIES, Policy


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        vocab_size: V, number of different tokens.
        context: the most tokens it sees at once.
        layers: number of blocks.
        width: D, features per token.
        heads: H, attention heads; must divide `width`.
        tied: whether the head projects by the matrix of the token embedding (Press and Wolf, 2017,
            arXiv 1608.05859).
        policy: what is computed in which dtype.
    """

    vocab_size: int = 256
    context: int = 128
    layers: int = 8
    width: int = 128
    heads: int = 4
    tied: bool = False
    policy: Policy = POLICIES["fp32"]

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "width", "heads"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} must be divisible by heads={self.heads}; "
                f"choose a width of {self.width - self.width % self.heads + self.heads}, for one"
            )


class Embedding(nnx.Module):
    """Token plus position embedding."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        self.token = nnx.Embed(
            config.vocab_size, config.width, embedding_init=init, **_dtypes(config), rngs=rngs
        )
        self.position = nnx.Embed(
            config.context, config.width, embedding_init=init, **_dtypes(config), rngs=rngs
        )

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        """Embed int `[B, S]` tokens to float `[B, S, D]`."""
        return self.token(tokens_BS) + self.position(jnp.arange(tokens_BS.shape[1]))


class CausalAttention(nnx.Module):
    """Multi-head attention in which a token sees itself and what came before."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        width = config.width
        init = nnx.initializers.normal(0.02)
        self.heads = config.heads
        self.softmax_dtype = config.policy.softmax
        self.qkv = nnx.Linear(
            width, 3 * width, kernel_init=_columns(init), **_dtypes(config), rngs=rngs
        )
        self.out = nnx.Linear(
            width, width, kernel_init=_rows(_residual_init(config)), **_dtypes(config), rngs=rngs
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Attend over float `[B, S, D]`."""
        B, S, D = x_BSD.shape
        qkv_TE = self.qkv(x_BSD.reshape(B * S, D))
        q_BHSK, k_BHSK, v_BHSK = qkv_TE.reshape(B, S, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        scores_BHSS = jnp.einsum(
            "bhqk,bhsk->bhqs", q_BHSK, k_BHSK, preferred_element_type=self.softmax_dtype
        )
        scores_BHSS *= (D // self.heads) ** -0.5
        causal_SS = jnp.tril(jnp.ones((S, S), bool))
        scores_BHSS = jnp.where(causal_SS, scores_BHSS, jnp.finfo(scores_BHSS.dtype).min)
        shares_BHSS = jax.nn.softmax(scores_BHSS).astype(v_BHSK.dtype)
        mixed_BHSK = jnp.einsum("bhqs,bhsk->bhqk", shares_BHSS, v_BHSK)
        return self.out(mixed_BHSK.transpose(0, 2, 1, 3).reshape(B * S, D)).reshape(B, S, D)


class MLP(nnx.Module):
    """The two-layer perceptron of a block, four times as wide inside."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        width = config.width
        init = nnx.initializers.normal(0.02)
        self.up = nnx.Linear(
            width, 4 * width, kernel_init=_columns(init), **_dtypes(config), rngs=rngs
        )
        self.down = nnx.Linear(
            4 * width,
            width,
            kernel_init=_rows(_residual_init(config)),
            **_dtypes(config),
            rngs=rngs,
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Transform float `[B, S, D]` token by token."""
        B, S, D = x_BSD.shape
        return self.down(jax.nn.gelu(self.up(x_BSD.reshape(B * S, D)))).reshape(B, S, D)


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs=rngs)
        self.attention = CausalAttention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Transform float `[B, S, D]`."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD).astype(x_BSD.dtype))
        return x_BSD + self.mlp(self.mlp_norm(x_BSD).astype(x_BSD.dtype))


class Head(nnx.Module):
    """Final norm and projection to the vocabulary, by the embedding's own matrix if tied."""

    def __init__(self, config: GPTConfig, token: nnx.Embed, *, rngs: nnx.Rngs) -> None:
        self.norm = _norm(config, rngs=rngs)
        self.output_dtype = config.policy.output
        if config.tied:
            self.token = token
            return
        self.project = nnx.Linear(
            config.width,
            config.vocab_size,
            use_bias=False,
            kernel_init=nnx.initializers.normal(0.02),
            **_dtypes(config),
            rngs=rngs,
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Map float `[B, S, D]` to logits `[B, S, V]`."""
        B, S, D = x_BSD.shape
        x_TD = self.norm(x_BSD).astype(x_BSD.dtype).reshape(B * S, D)
        logits_TV = self.token.attend(x_TD) if hasattr(self, "token") else self.project(x_TD)
        return logits_TV.reshape(B, S, -1).astype(self.output_dtype)


class GPT(nnx.Module):
    """Embedding, blocks and head."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.embedding = Embedding(config, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.head = Head(config, self.embedding.token, rngs=rngs)

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        """Map int `[B, S]` tokens to the logits `[B, S, V]` of each next token."""
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(x_BSD)


def _norm(config: GPTConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    policy = config.policy
    return nnx.LayerNorm(config.width, dtype=policy.norm, param_dtype=policy.param, rngs=rngs)


def _dtypes(config: GPTConfig) -> dict[str, Any]:
    """Those of a layer that multiplies."""
    return {"dtype": config.policy.compute, "param_dtype": config.policy.param}


def _columns(init: nnx.Initializer) -> nnx.Initializer:
    """A kernel whose outputs are divided over `model`."""
    return nnx.with_partitioning(init, (None, "model"), eager_sharding=False)


def _rows(init: nnx.Initializer) -> nnx.Initializer:
    """A kernel whose inputs are divided over `model`."""
    return nnx.with_partitioning(init, ("model", None), eager_sharding=False)


def _residual_init(config: GPTConfig) -> nnx.Initializer:
    """Smaller weights where a block adds to the residual stream, so that depth does not grow it."""
    return nnx.initializers.normal(0.02 * (2 * config.layers) ** -0.5)
