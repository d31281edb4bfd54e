"""The same model on one device: the oracle that a pipeline's numbers are held against.

Plain gradient accumulation: a scan over the microbatches in order, autodiff through the whole
model, sums in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jpipe.pipeline.keys import microbatch_keys
from jpipe.pipeline.losses import Loss, LossTerms, add_terms, loss_terms, no_terms
from jpipe.pipeline.stages import Params, Stages, Tree, no_state


def reference_value_and_grad(
    stages: Stages, loss: Loss, *, has_aux: bool = False
) -> jax.stages.Wrapped:
    """The function that `pipeline_value_and_grad` must equal, without a pipeline.

    Args:
        stages: the model.
        loss: `(outputs, targets) -> scalar`, the mean loss of a microbatch, or `-> LossTerms`.
        has_aux: whether to return `LossTerms.aux` as well.

    Returns:
        A jitted `(params, inputs, targets, state=None, key=None, loss_scale=None)
        -> (loss, gradients)`, with the new state as a third result if `state` is given; inputs and
        targets are pytrees of `[M, microbatch, ...]` arrays, the loss is the mean over microbatches
        in float32, the gradients, times the loss scale, are at least float32.
    """
    parts = stages.parts

    def value_and_grad(
        params: Params,
        inputs: Tree,
        targets: Tree,
        state: Params | None = None,
        key: jax.Array | None = None,
        loss_scale: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        num_microbatches = jax.tree.leaves(inputs)[0].shape[0]
        stored, params = params, stages.tied(params)
        had_state, state = state is not None, no_state(params) if state is None else state

        def microbatch_loss(
            params: Params, state: Params, i: jax.Array | int, inputs: Tree, targets: Tree
        ) -> tuple[jax.Array, tuple[LossTerms, Params]]:
            outputs, updates = parts.run(params, state, inputs, microbatch_keys(key, i))
            terms = loss_terms(loss(outputs, targets))
            updated = jax.tree.map(lambda old, new: old if new is None else new, state, updates)
            return terms.total, (terms, updated)

        def accumulate(
            sums: tuple[LossTerms, Params, Params], batch: tuple[jax.Array, Tree, Tree]
        ) -> tuple[tuple[LossTerms, Params, Params], None]:
            terms, grads, state = sums
            value, pullback, (new, state) = jax.vjp(
                lambda p: microbatch_loss(p, state, *batch), params, has_aux=True
            )
            seed = jnp.full_like(value, 1 / num_microbatches)
            (dparams,) = pullback(seed if loss_scale is None else seed * loss_scale)
            grads = jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, dparams)
            return (add_terms(terms, new), grads, state), None

        zeros = jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
        )
        first = jax.tree.map(lambda a: a[0], (inputs, targets))
        _, (shapes, _) = jax.eval_shape(microbatch_loss, params, state, 0, *first)
        start = (no_terms(shapes), zeros, state)
        batches = (jnp.arange(num_microbatches), inputs, targets)
        (terms, grads, state), _ = jax.lax.scan(accumulate, start, batches)
        scale = num_microbatches / terms.weight
        grads = jax.tree.map(lambda g: g * scale, grads)
        mean = terms.total / terms.weight
        value, grads = (mean, terms.aux) if has_aux else mean, stages.tied_back(grads, stored)
        return (value, grads, state) if had_state else (value, grads)

    return jax.jit(value_and_grad)
