"""A residual network for images in flax.nnx, written as any Flax user would write it.

He et al., "Deep Residual Learning for Image Recognition", 2016 (arXiv 1512.03385); the stride of a
bottleneck lies in its 3x3 convolution, as in most implementations since (ResNet v1.5).

Shapes: B examples, H x W pixels, C channels.
"""

import dataclasses

import jax
from flax import nnx

from jpipe.precision import POLICIES, Policy

DEPTHS = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}
"""Kind of block, and how many of each width, by number of layers."""


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a ResNet.

    Attributes:
        depth: one of `DEPTHS`.
        classes: number of classes.
        channels: of the images.
        width: channels of the first blocks; doubled three times.
        policy: what is computed in which dtype.
        small_images: whether images are too small (32 pixels and below) to be shrunk to a quarter
            before the first block: a 3x3 convolution instead of 7x7 with stride and pooling.
    """

    depth: int = 18
    classes: int = 10
    channels: int = 1
    width: int = 64
    small_images: bool = True
    policy: Policy = POLICIES["fp32"]

    def __post_init__(self) -> None:
        if self.depth not in DEPTHS:
            raise ValueError(f"depth={self.depth} is none of {', '.join(map(str, DEPTHS))}")
        for name in ("classes", "channels", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


class NormedConv(nnx.Module):
    """A convolution without bias, and a batch norm."""

    def __init__(
        self,
        before: int,
        after: int,
        size: int,
        stride: int = 1,
        scale: float = 1.0,
        *,
        policy: Policy,
        rngs: nnx.Rngs,
    ) -> None:
        self.conv = nnx.Conv(
            before,
            after,
            (size, size),
            strides=stride,
            use_bias=False,
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            dtype=policy.compute,
            param_dtype=policy.param,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(
            after,
            momentum=0.9,
            scale_init=nnx.initializers.constant(scale),
            dtype=policy.norm,
            param_dtype=policy.param,
            rngs=rngs,
        )

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Map float `[B, H, W, before]` to `[B, H / stride, W / stride, after]`."""
        y_BHWC = self.conv(x_BHWC)
        return self.norm(y_BHWC).astype(y_BHWC.dtype)


class Stem(nnx.Module):
    """What comes before the blocks."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        self.small = config.small_images
        size, stride = (3, 1) if self.small else (7, 2)
        self.conv = NormedConv(
            config.channels, config.width, size, stride, policy=config.policy, rngs=rngs
        )

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Map float images `[B, H, W, channels]` to `[B, H', W', width]`."""
        x_BHWC = nnx.relu(self.conv(x_BHWC))
        if self.small:
            return x_BHWC
        return nnx.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding="SAME")


class ResidualBlock(nnx.Module):
    """Convolutions beside a shortcut, which projects where the shape changes."""

    def __init__(
        self,
        kind: str,
        before: int,
        width: int,
        stride: int,
        *,
        policy: Policy,
        rngs: nnx.Rngs,
    ) -> None:
        if kind == "basic":
            after, sizes = width, [(before, width, 3, stride), (width, width, 3, 1)]
        else:
            after = 4 * width
            sizes = [(before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1)]
        # The last norm starts at zero, and so each block as the identity (Goyal et al., 2017).
        scales = [1.0] * (len(sizes) - 1) + [0.0]
        self.convs = nnx.List(
            [
                NormedConv(*size, k, policy=policy, rngs=rngs)
                for size, k in zip(sizes, scales, strict=True)
            ]
        )
        if stride != 1 or before != after:
            self.shortcut = NormedConv(before, after, 1, stride, policy=policy, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Transform float `[B, H, W, C]`."""
        y_BHWC = x_BHWC
        for k, conv in enumerate(self.convs):
            y_BHWC = conv(nnx.relu(y_BHWC) if k else y_BHWC)
        shortcut = self.shortcut(x_BHWC) if hasattr(self, "shortcut") else x_BHWC
        return nnx.relu(y_BHWC + shortcut)


class Classifier(nnx.Module):
    """Mean over the pixels, and a linear map to the classes."""

    def __init__(self, features: int, classes: int, *, policy: Policy, rngs: nnx.Rngs) -> None:
        self.output_dtype = policy.output
        self.project = nnx.Linear(
            features, classes, dtype=policy.compute, param_dtype=policy.param, rngs=rngs
        )

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Map float `[B, H, W, C]` to logits `[B, classes]`."""
        return self.project(x_BHWC.mean((1, 2))).astype(self.output_dtype)


class ResNet(nnx.Module):
    """Stem, residual blocks and classifier."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        kind, counts = DEPTHS[config.depth]
        self.stem = Stem(config, rngs=rngs)
        blocks, features = [], config.width
        for group, count in enumerate(counts):
            width = config.width * 2**group
            for k in range(count):
                stride = 2 if group and not k else 1
                blocks.append(
                    ResidualBlock(kind, features, width, stride, policy=config.policy, rngs=rngs)
                )
                features = width if kind == "basic" else 4 * width
        self.blocks = nnx.List(blocks)
        self.head = Classifier(features, config.classes, policy=config.policy, rngs=rngs)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Map float images `[B, H, W, channels]` to logits `[B, classes]`."""
        x_BHWC = self.stem(images_BHWC)
        for block in self.blocks:
            x_BHWC = block(x_BHWC)
        return self.head(x_BHWC)
