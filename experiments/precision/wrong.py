"""What jpipe does not do: a loss scale that never changes, and sums in float16."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jpipe.optim import LossScaleState, loss_scale
from jpipe.pipeline import Loss, Stages
from jpipe.precision import cast
from jpipe.reference import reference_value_and_grad
from jpipe.train_step import Metrics, TrainState

Tree = Any


def constant_loss_scale(
    inner: optax.GradientTransformation, scale: float
) -> optax.GradientTransformation:
    """Divides by the same scale for ever and skips nothing: a loss scale done wrong."""

    def init_fn(params: Tree) -> LossScaleState:
        none = jnp.zeros((), jnp.int32)
        own = jnp.float32(scale)
        return LossScaleState(own, own, none, none, none, inner.init(params))

    def update_fn(
        updates: Tree, state: LossScaleState, params: Tree | None = None
    ) -> tuple[Tree, LossScaleState]:
        unscaled = jax.tree.map(lambda g: g / state.scale, updates)
        updates, inner_state = inner.update(unscaled, state.inner, params)
        return updates, state._replace(inner=inner_state)

    return optax.GradientTransformation(init_fn, update_fn)


def half_sums(stages: Stages, loss: Loss) -> Callable[..., tuple[jax.Array, Tree]]:
    """Loss and gradients as a careless loop makes them: summed in float16, divided at the end."""
    of_batch = reference_value_and_grad(stages, loss)

    def value_and_grad(
        params: Tree, inputs: jax.Array, targets: jax.Array, scale: jax.Array
    ) -> tuple[jax.Array, Tree]:
        def add(sums: Tree, microbatch: tuple[jax.Array, jax.Array]) -> tuple[Tree, jax.Array]:
            inputs, targets = (a[None] for a in microbatch)
            value, grads = of_batch(params, inputs, targets, loss_scale=scale)
            return jax.tree.map(jnp.add, sums, cast(grads, "float16")), value

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, "float16"), params)
        sums, values = jax.lax.scan(add, zeros, (inputs, targets))
        grads = jax.tree.map(lambda g: g / inputs.shape[0], cast(sums, "float32"))
        return values.mean(), grads

    return value_and_grad


def half_sums_step(
    stages: Stages, loss: Loss, optimizer: optax.GradientTransformation
) -> jax.stages.Wrapped:
    """A training step with `half_sums`."""
    value_and_grad = half_sums(stages, loss)

    def step(
        state: TrainState, inputs: jax.Array, targets: jax.Array
    ) -> tuple[TrainState, Metrics]:
        scale = loss_scale(state.opt_state)
        value, grads = value_and_grad(state.params, inputs, targets, scale)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = Metrics(value, optax.tree.norm(grads) / scale, (), scale, jnp.bool_(False))
        return state._replace(params=params, opt_state=opt_state), metrics

    return jax.jit(step)
