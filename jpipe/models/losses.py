"""Losses of the models."""

import jax
import jax.numpy as jnp

from jpipe.pipeline import LossTerms


def next_token_loss(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per token, a float32 scalar."""
    return jnp.mean(_cross_entropy(logits_BSV, targets_BS))


def classification_loss(logits_BK: jax.Array, labels_B: jax.Array) -> LossTerms:
    """Mean cross-entropy in nats per example; `aux` counts the right guesses, under `right`."""
    losses_B = _cross_entropy(logits_BK, labels_B)
    right = jnp.sum(jnp.argmax(logits_BK, axis=-1) == labels_B)
    return LossTerms(jnp.sum(losses_B), jnp.float32(losses_B.size), {"right": right})


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Per target, in at least float32; the classes are the last dim of the logits."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    of_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - of_target
