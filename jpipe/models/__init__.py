"""Models to show and test pipelines with, written as any Flax user would."""

from jpipe.models.gpt import GPT, GPTConfig
from jpipe.models.losses import classification_loss, next_token_loss
from jpipe.models.resnet import ResNet, ResNetConfig
from jpipe.models.vit import ViT, ViTConfig

__all__ = [
    "GPT",
    "GPTConfig",
    "ResNet",
    "ResNetConfig",
    "ViT",
    "ViTConfig",
    "classification_loss",
    "next_token_loss",
]
