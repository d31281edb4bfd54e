"""A vision transformer in flax.nnx, made of Flax's own layers.

Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021 (arXiv 2010.11929), with the mean over
patches in place of a class token.

Shapes: B examples, H x W pixels, C channels, N patches, D width.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Sizes of a ViT.

    Attributes:
        image: pixels along each side of an image.
        patch: pixels along each side of a patch; must divide `image`.
        channels: of the images.
        classes: number of classes.
        layers: number of blocks.
        width: D, features per patch.
        heads: attention heads; must divide `width`.
        dropout: share of features dropped in training.
    """

    image: int = 8
    patch: int = 2
    channels: int = 1
    classes: int = 10
    layers: int = 8
    width: int = 64
    heads: int = 4
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for whole, part in (("image", "patch"), ("width", "heads")):
            a, b = getattr(self, whole), getattr(self, part)
            if b < 1 or a < 1 or a % b:
                raise ValueError(f"{whole}={a} must be a multiple of {part}={b}")


class Patches(nnx.Module):
    """Linear embedding of patches, plus their positions."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        p, count = config.patch, (config.image // config.patch) ** 2
        self.conv = nnx.Conv(config.channels, config.width, (p, p), strides=p, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (count, config.width)))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Map float images `[B, H, W, C]` to `[B, N, D]`."""
        x_BHWD = self.conv(images_BHWC)
        x_BND = x_BHWD.reshape(x_BHWD.shape[0], -1, x_BHWD.shape[-1])
        return self.dropout(x_BND + self.position[...])


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(config.heads, config.width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x_BND: jax.Array) -> jax.Array:
        """Transform float `[B, N, D]`."""
        x_BND = x_BND + self.dropout(self.attention(self.attention_norm(x_BND)))
        y_BND = self.down(nnx.gelu(self.up(self.mlp_norm(x_BND))))
        return x_BND + self.dropout(y_BND)


class Head(nnx.Module):
    """Norm, mean over the patches, and a linear map to the classes."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.project = nnx.Linear(config.width, config.classes, rngs=rngs)

    def __call__(self, x_BND: jax.Array) -> jax.Array:
        """Map float `[B, N, D]` to logits `[B, classes]`."""
        return self.project(jnp.mean(self.norm(x_BND), axis=1))


class ViT(nnx.Module):
    """Patches, blocks and head."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.patches = Patches(config, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.head = Head(config, rngs=rngs)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Map float images `[B, H, W, C]` to logits `[B, classes]`."""
        x_BND = self.patches(images_BHWC)
        for block in self.blocks:
            x_BND = block(x_BND)
        return self.head(x_BND)
