"""The same model on one device: the oracle that a pipeline's numbers are held against.

Plain gradient accumulation: a scan over the microbatches in order, autodiff through the whole
model, sums in float32.
"""

import jax
import jax.numpy as jnp

from jpipe.pipeline.stages import Loss, Params, Stages, Tree


def reference_value_and_grad(stages: Stages, loss: Loss) -> jax.stages.Wrapped:
    """The function that `pipeline_value_and_grad` must equal, without a pipeline.

    Args:
        stages: the model.
        loss: `(outputs, targets) -> scalar`, the mean loss of a microbatch.

    Returns:
        A jitted `(params, inputs, targets) -> (loss, gradients)`; inputs and targets are pytrees
        of `[M, microbatch, ...]` arrays, the loss is the mean over microbatches in float32, the
        gradients are at least float32.
    """

    def microbatch_loss(params: Params, inputs: Tree, targets: Tree) -> jax.Array:
        x = stages.body(params.body, stages.stem(params.stem, inputs))
        return loss(stages.head(params.head, x), targets).astype(jnp.float32)

    def value_and_grad(params: Params, inputs: Tree, targets: Tree) -> tuple[jax.Array, Params]:
        num_microbatches = jax.tree.leaves(inputs)[0].shape[0]

        def accumulate(
            sums: tuple[jax.Array, Params], batch: tuple[Tree, Tree]
        ) -> tuple[tuple[jax.Array, Params], None]:
            total, grads = sums
            value, pullback = jax.vjp(lambda p: microbatch_loss(p, *batch), params)
            (dparams,) = pullback(jnp.float32(1 / num_microbatches))
            grads = jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, dparams)
            return (total + value, grads), None

        zeros = jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
        )
        start = (jnp.zeros((), jnp.float32), zeros)
        (total, grads), _ = jax.lax.scan(accumulate, start, (inputs, targets))
        return total / num_microbatches, grads

    return jax.jit(value_and_grad)
