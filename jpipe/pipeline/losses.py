"""What a loss returns: a mean over equal microbatches, or a sum and what to divide it by."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any


class LossTerms(NamedTuple):
    """A loss over examples that do not all count the same, such as tokens behind a mask.

    Over a step the totals are summed, and so are the weights, and the loss is the one divided by
    the other: the weighted mean over the whole batch, however it was cut into microbatches.

    Attributes:
        total: floating-point scalar, the sum over the microbatch of weight times loss.
        weight: scalar, the sum over the microbatch of the weights; no gradient flows through it.
            If all weights of a step are 0, the loss and the gradients are not numbers.
        aux: pytree of arrays to report, such as the number of right guesses; summed over
            microbatches and over the `data` axis, in at least float32 or int32.
    """

    total: jax.Array
    weight: jax.Array
    aux: Tree = ()


Loss = Callable[[Tree, Tree], Any]
"""`(outputs, targets) -> scalar`, the plain mean over the examples of one microbatch, or
`-> LossTerms` if they do not all count the same. Over the `data` axis each device has a part of the
examples, and means of parts are only averaged rightly if every example counts."""


def loss_terms(value: jax.Array | LossTerms) -> LossTerms:
    """Terms in float32; a scalar counts as one example."""
    terms = value if isinstance(value, LossTerms) else LossTerms(value, jnp.ones(()))
    weight = jax.lax.stop_gradient(jnp.asarray(terms.weight, jnp.float32))
    aux = jax.tree.map(_summable, terms.aux)
    total = jnp.asarray(terms.total)
    return LossTerms(total.astype(jnp.promote_types(total.dtype, jnp.float32)), weight, aux)


def _summable(value: Any) -> jax.Array:
    """In a dtype in which many can be summed: a bfloat16 count would stop at 256."""
    array = jax.lax.stop_gradient(jnp.asarray(value))
    least = jnp.float32 if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.int32
    return array.astype(jnp.promote_types(array.dtype, least))


def no_terms(like: Any) -> LossTerms:
    """Zeros to sum up from, of the given shapes and dtypes."""
    zeros: LossTerms = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    return zeros


def add_terms(sums: LossTerms, terms: LossTerms) -> LossTerms:
    """One microbatch more."""
    total: LossTerms = jax.tree.map(jnp.add, sums, terms)
    return total
