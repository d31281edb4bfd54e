"""The task of predicting the next token of a text, by a GPT."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpipe.data import Batch, TokenBatches, bigram_loss, load_tokens, validation_windows
from jpipe.models import GPT, GPTConfig, next_token_loss
from jpipe.pipeline import Loss, Params
from jpipe.precision import POLICIES
from jpipe.train.options import TrainOptions
from jpipe.train.sample import sample_tokens
from jpipe.train.task import Task, Yardstick

_PROMPT = 64
_SAMPLE = 256
_SAMPLE_TOKENS = 2**17  # seen in all, for each token sampled the model sees a whole context


class LanguageTask(Task):
    """See `Task`.

    Args:
        options: of the run.
        microbatch_size: examples of a microbatch, over all devices.

    Raises:
        ValueError: if the options do not fit each other or the text.
    """

    stem = "embedding"
    loss: Loss = staticmethod(next_token_loss)

    def __init__(self, options: TrainOptions, microbatch_size: int) -> None:
        self.options = options
        self.tokens = load_tokens(options.data, options.vocab_size)
        self.config = GPTConfig(
            vocab_size=self.tokens.vocab_size,
            context=options.context,
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            tied=options.tied,
            policy=POLICIES[options.precision],
        )
        self.batches = TokenBatches(
            self.tokens.train,
            context=options.context,
            microbatch_size=microbatch_size,
            seed=options.seed,
        )
        windows = validation_windows(
            self.tokens.validation, context=options.context, microbatch_size=microbatch_size
        )
        self.validation: tuple[Any, Any] = windows.windows
        self.item = "byte" if self.tokens.is_bytes else "token"
        self.items_per_example = options.context
        self.inputs = jax.ShapeDtypeStruct((microbatch_size, options.context), np.int32)
        self.targets = self.inputs

    def facts(self) -> dict[str, str]:
        """What to say of model and data."""
        config = self.config
        sizes = (
            f"{config.layers} layers, width {config.width}, {config.heads} heads, "
            f"context {config.context}, vocabulary {config.vocab_size}"
        )
        return {
            "model": sizes + (", tied embeddings" if config.tied else ""),
            "data": self.tokens.description,
        }

    def yardstick(self) -> Yardstick:
        """A bigram model."""
        inputs, targets = self.validation
        validation = Batch(inputs, targets)
        loss = bigram_loss(self.tokens.train, validation, self.tokens.vocab_size)
        return Yardstick("bigram model", loss)

    def show(self, mesh: Mesh, params: Params) -> tuple[str, str, str]:
        """A prompt from the validation text, and what the model writes after it."""
        options = self.options
        length = max(1, min(_SAMPLE, _SAMPLE_TOKENS // options.context))
        prompt = self.validation[0][0, 0, : min(_PROMPT, options.context)]
        added = sample_tokens(
            self.model.eval_stages,
            mesh,
            params,
            prompt,
            context=options.context,
            length=length,
            seed=options.seed,
        )
        if self.tokens.is_bytes:
            before, after = (
                bytes(t.astype(np.uint8)).decode("utf-8", "replace") for t in (prompt, added)
            )
        else:
            before, after = (" ".join(map(str, t)) + " " for t in (prompt, added))
        title = f"a sample: {length} {self.item}s after a prompt from the validation text"
        return title, before, after

    def make_model(self, rngs: nnx.Rngs) -> GPT:
        """The model itself."""
        return GPT(self.config, rngs=rngs)
