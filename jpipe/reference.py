"""The same model on one device: the oracle that a pipeline's numbers are held against.

Plain gradient accumulation: a scan over the microbatches in order, autodiff through the whole
model, sums in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jpipe.pipeline.losses import Loss, LossTerms, add_terms, loss_terms, no_terms
from jpipe.pipeline.stages import Params, Stages, Tree


def reference_value_and_grad(
    stages: Stages, loss: Loss, *, has_aux: bool = False
) -> jax.stages.Wrapped:
    """The function that `pipeline_value_and_grad` must equal, without a pipeline.

    Args:
        stages: the model.
        loss: `(outputs, targets) -> scalar`, the mean loss of a microbatch, or `-> LossTerms`.
        has_aux: whether to return `LossTerms.aux` as well.

    Returns:
        A jitted `(params, inputs, targets) -> (loss, gradients)`; inputs and targets are pytrees
        of `[M, microbatch, ...]` arrays, the loss is the mean over microbatches in float32, the
        gradients are at least float32.
    """

    def microbatch_loss(params: Params, inputs: Tree, targets: Tree) -> tuple[jax.Array, LossTerms]:
        x = stages.run_body(params.body, stages.stem(params.stem, inputs))
        terms = loss_terms(loss(stages.head(params.head, x), targets))
        return terms.total, terms

    def value_and_grad(params: Params, inputs: Tree, targets: Tree) -> tuple[Any, Params]:
        num_microbatches = jax.tree.leaves(inputs)[0].shape[0]

        def accumulate(
            sums: tuple[LossTerms, Params], batch: tuple[Tree, Tree]
        ) -> tuple[tuple[LossTerms, Params], None]:
            terms, grads = sums
            value, pullback, new = jax.vjp(
                lambda p: microbatch_loss(p, *batch), params, has_aux=True
            )
            (dparams,) = pullback(jnp.full_like(value, 1 / num_microbatches))
            grads = jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, dparams)
            return (add_terms(terms, new), grads), None

        zeros = jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
        )
        first = jax.tree.map(lambda a: a[0], (inputs, targets))
        nothing = no_terms(jax.eval_shape(microbatch_loss, params, *first)[1])
        (terms, grads), _ = jax.lax.scan(accumulate, (nothing, zeros), (inputs, targets))
        scale = num_microbatches / terms.weight
        grads = jax.tree.map(lambda g: g * scale, grads)
        mean = terms.total / terms.weight
        return ((mean, terms.aux) if has_aux else mean), grads

    return jax.jit(value_and_grad)
