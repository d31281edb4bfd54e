"""Models to show and test pipelines with, written as any Flax user would."""

from jpipe.models.gpt import GPT, GPTConfig, next_token_loss

__all__ = ["GPT", "GPTConfig", "next_token_loss"]
