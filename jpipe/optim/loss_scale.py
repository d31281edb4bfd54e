"""Dynamic loss scaling: gradients too small for float16 survive, too large ones cost one step.

The loss is multiplied by a scale before the backward, and the gradients divided by it afterwards.
Whenever a gradient comes out infinite or not a number, the step is skipped and the scale lowered;
after long enough without, it is raised. Micikevicius et al., "Mixed Precision Training", 2018
(arXiv 1710.03740); the rules are those of `torch.amp.GradScaler`, to the step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
        scale: float32 scalar, what the next loss is to be multiplied by.
        min_scale: float32 scalar, the least it may become.
        finite_steps: int32 scalar, steps with finite gradients since the scale last changed.
        skipped_in_a_row: int32 scalar, steps skipped since the last one that was not.
        skipped: int32 scalar, steps skipped in all.
        inner: state of the inner optimizer.
    """

    scale: jax.Array
    min_scale: jax.Array
    finite_steps: jax.Array
    skipped_in_a_row: jax.Array
    skipped: jax.Array
    inner: optax.OptState


class LossScaleError(ArithmeticError):
    """The scale is as low as it may be, and the gradients are still not finite."""


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    init: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 1.0,
    *,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer for gradients of a loss that was multiplied by a scale.

    It must be the outermost transformation: clipping, compression and weight decay belong into
    `inner`. There the gradients arrive divided by the scale, at least float32. Multiply the loss,
    or what seeds its backward, by `loss_scale(opt_state)`; `jpipe.train_step.make_train_step` does.

    If any gradient is infinite or not a number, `inner` is left as it is, its error feedback and
    all, the updates are zeros that change no bit of a parameter, and the scale becomes
    `max(scale * backoff_factor, min_scale)`. After `growth_interval` finite steps it becomes
    `scale * growth_factor`, unless that is infinite.

    Args:
        inner: the optimizer.
        init: the scale to begin with.
        growth_factor: more than 1.
        backoff_factor: between 0 and 1.
        growth_interval: finite steps until the scale grows.
        min_scale: the least scale.
        axis_name: where the update runs inside of `jax.shard_map` on gradients of which each
            device has its own part: the mesh axes over which all must agree. None elsewhere.

    Raises:
        ValueError: if a factor or a number is out of range.
    """
    if not min_scale > 0 or not init >= min_scale:
        raise ValueError(
            f"init={init} and min_scale={min_scale} must be positive, and init not below min_scale"
        )
    if not growth_factor > 1:
        raise ValueError(f"growth_factor={growth_factor} must be more than 1, such as 2.0")
    if not 0 < backoff_factor < 1:
        raise ValueError(f"backoff_factor={backoff_factor} must be between 0 and 1, such as 0.5")
    if growth_interval < 1:
        raise ValueError(f"growth_interval={growth_interval} must be at least 1 step")
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: Tree) -> LossScaleState:
        # Arrays of their own for all, so that they can be donated.
        none, in_a_row, in_all = (jnp.zeros((), jnp.int32) for _ in range(3))
        wide = jax.tree.map(_at_least_float32, params)  # as the gradients will be
        return LossScaleState(
            jnp.float32(init), jnp.float32(min_scale), none, in_a_row, in_all, inner.init(wide)
        )

    def update_fn(
        updates: Tree, state: LossScaleState, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, LossScaleState]:
        finite = all_finite(updates, axis_name)
        unscaled = jax.tree.map(lambda g: _at_least_float32(g) / state.scale, updates)
        new, inner_state = inner.update(unscaled, state.inner, params, **extra_args)

        # -0.0 is what can be added to any number without changing it, -0.0 included.
        new = jax.tree.map(lambda u: jnp.where(finite, u, jnp.full_like(u, -0.0)), new)
        inner_state = keep_if(finite, inner_state, state.inner)
        return new, _next(state, finite)._replace(inner=inner_state)

    def _next(state: LossScaleState, finite: jax.Array) -> LossScaleState:
        steps = state.finite_steps + 1
        grown = state.scale * growth_factor
        grows = steps == growth_interval
        after_finite = jnp.where(grows & jnp.isfinite(grown), grown, state.scale)
        after_skip = jnp.maximum(state.scale * backoff_factor, state.min_scale)
        return state._replace(
            scale=jnp.where(finite, after_finite, after_skip),
            finite_steps=jnp.where(finite & ~grows, steps, 0),
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
            skipped=jnp.where(finite, state.skipped, state.skipped + 1),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def loss_scale_state(opt_state: optax.OptState) -> LossScaleState | None:
    """The state of a `dynamic_loss_scale` within an optimizer's state; None if there is none.

    Raises:
        ValueError: if there are several.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, LossScaleState))
    found = [node for node in nodes if isinstance(node, LossScaleState)]
    if len(found) > 1:
        raise ValueError(
            f"the optimizer has {len(found)} loss scales, but there is one loss; put one "
            "dynamic_loss_scale around all of it"
        )
    return found[0] if found else None


def loss_scale(opt_state: optax.OptState) -> jax.Array:
    """What to multiply the next loss by: float32 scalar, 1 without `dynamic_loss_scale`."""
    state = loss_scale_state(opt_state)
    return jnp.float32(1) if state is None else state.scale


def check_loss_scale(opt_state: optax.OptState, max_skipped: int = 20) -> None:
    """Stop a training that only skips steps: to be called between steps, outside of `jax.jit`.

    Args:
        opt_state: the optimizer's state.
        max_skipped: steps that may be skipped in a row while the scale is as low as it may be.

    Raises:
        LossScaleError: if there were more.
    """
    state = loss_scale_state(opt_state)
    if state is None or int(state.skipped_in_a_row) <= max_skipped:
        return
    if float(state.scale) <= float(state.min_scale):
        raise LossScaleError(
            f"the gradients of the last {int(state.skipped_in_a_row)} steps were infinite or not a "
            f"number, though the loss scale is down to {float(state.scale):g}: the model itself "
            "diverges or divides by zero; a lower learning rate, bfloat16 or float32 may help"
        )


def all_finite(tree: Tree, axis_name: str | Sequence[str] | None = None) -> jax.Array:
    """Whether all numbers are finite, on all devices of the named axes: boolean scalar."""
    finite = jnp.bool_(True)
    for leaf in jax.tree.leaves(tree):
        finite &= jnp.isfinite(leaf).all()
    return finite if axis_name is None else jax.lax.pmin(finite.astype(jnp.int32), axis_name) > 0


def keep_if(condition: jax.Array, new: Tree, old: Tree) -> Tree:
    """The new arrays if the condition holds, else the old ones, bit by bit."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _at_least_float32(array: jax.Array) -> jax.Array:
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
