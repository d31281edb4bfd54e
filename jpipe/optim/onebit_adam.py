"""Adam whose momentum travels as one bit a number.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", 2021 (arXiv 2102.02888), Algorithm 1. Adam is not linear in the gradient, so errors cannot
be fed back through it; but its variance soon stops changing. Once it is frozen what is left is
momentum with a fixed step for each coordinate, and that is linear.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jpipe.optim.reduction import Reduction, ReductionState
from jpipe.optim.two_stage import BOTH, Feedback

Tree = Any

_STABLE = 0.96  # share of the variance's l1 norm some steps ago, as in the paper


class OneBitAdamState(NamedTuple):
    """State of `scale_by_onebit_adam`.

    Attributes:
        count: int32 scalar, updates made.
        frozen_at: int32 scalar, after which of them the variance was frozen; 0 before.
        mu: the momentum, at least float32, the same bits on all replicas.
        nu: the variance, likewise.
        norms: float32 vector, the variance's l1 norm in each of the last steps; of size 0 with a
            fixed `freeze_step`.
        reduction: what the compression feeds back.
    """

    count: jax.Array  # type: ignore[assignment]  # as all of optax calls it
    frozen_at: jax.Array
    mu: Tree
    nu: Tree
    norms: jax.Array
    reduction: ReductionState


def scale_by_onebit_adam(
    mesh: Mesh,
    specs: Tree | None = None,
    *,
    freeze_step: int | None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    max_norm: float | None = None,
    axis: str = "data",
    block_size: int = 256,
    feedback: Feedback = BOTH,
) -> optax.GradientTransformation:
    """Like `optax.scale_by_adam` of the mean gradient, with a compressed momentum later on.

    It takes the gradients of each replica, see `compressed_all_reduce`, and must come first.

    In the first `freeze_step` updates gradients are averaged in full precision, and the updates are
    those of `optax.scale_by_adam`. After that the variance and its bias correction stay as they
    are; each replica adds its own gradient to the shared momentum, and the mean of what results is
    taken as by `compressed_all_reduce("onebit")`. Coordinates whose variance is zero, which had no
    gradient until then, stay where they are from then on.

    Args:
        mesh: the mesh.
        specs: how parameters lie on it, see `Reduction`.
        freeze_step: updates in full precision, at least 1; None to freeze once the variance is
            stable: once its l1 norm and that of `1 / (1 - b2)` updates before differ by at most 4%.
        b1: decay of the momentum.
        b2: decay of the variance.
        eps: added to the root of the variance.
        eps_root: added to the variance below the root.
        max_norm: most that the norm of a gradient may be; longer ones are scaled down to it. Before
            the freeze that is the norm of the mean gradient, as of `optax.clip_by_global_norm`;
            after it that of each replica's own, which is longer by its noise.
        axis: the mesh axis of the replicas.
        block_size: numbers that share a scale; a multiple of 8.
        feedback: which errors are fed back.

    Raises:
        ValueError: if an argument is out of range.
    """
    if freeze_step is not None and freeze_step < 1:
        raise ValueError(
            f"freeze_step={freeze_step} must be at least 1: before, there is no variance"
        )
    for name, value in {"b1": b1, "b2": b2}.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be at least 0 and less than 1")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be more than 0, or None")
    full = Reduction("none", mesh, specs, axis=axis)
    onebit = Reduction("onebit", mesh, specs, axis=axis, block_size=block_size, feedback=feedback)
    memory = 0 if freeze_step is not None else max(1, round(1 / (1 - b2)))

    def init_fn(params: Tree) -> OneBitAdamState:
        def zeros(p: jax.Array) -> jax.Array:
            return jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))

        return OneBitAdamState(
            count=jnp.zeros((), jnp.int32),
            frozen_at=jnp.zeros((), jnp.int32),
            mu=jax.tree.map(zeros, params),
            nu=jax.tree.map(zeros, params),
            norms=jnp.zeros(memory, jnp.float32),
            reduction=onebit.init(params),
        )

    def update_fn(
        updates: Tree, state: OneBitAdamState, params: Tree | None = None
    ) -> tuple[Tree, OneBitAdamState]:
        del params
        frozen = state.frozen_at > 0

        def warm_up(state: OneBitAdamState) -> tuple[Tree, Tree, ReductionState]:
            mean, _ = full.mean(updates, ReductionState(()))
            mean = _clip(mean, optax.tree.norm(mean), max_norm)
            mu = optax.tree.update_moment(mean, state.mu, b1, 1)
            nu = optax.tree.update_moment_per_elem_norm(mean, state.nu, b2, 2)
            return mu, nu, state.reduction

        def compressed(state: OneBitAdamState) -> tuple[Tree, Tree, ReductionState]:
            own = _clip_each(updates, max_norm)
            own = optax.tree.update_moment(own, state.mu, b1, 1)
            mu, reduction = onebit.mean(own, state.reduction)
            return mu, state.nu, reduction

        mu, nu, reduction = jax.lax.cond(frozen, compressed, warm_up, state)
        count = optax.safe_increment(state.count)
        mu_hat = optax.tree.bias_correction(mu, b1, count)
        nu_hat = optax.tree.bias_correction(nu, b2, jnp.where(frozen, state.frozen_at, count))

        def step(m: jax.Array, v: jax.Array) -> jax.Array:
            moved = m / (jnp.sqrt(v + eps_root) + eps)
            return jnp.where(frozen & (v == 0), 0.0, moved)

        freezes, norms = _freezes(nu, count, state.norms)
        frozen_at = jnp.where(~frozen & freezes, count, state.frozen_at)
        new = OneBitAdamState(count, frozen_at, mu, nu, norms, reduction)
        return jax.tree.map(step, mu_hat, nu_hat), new

    def _freezes(
        nu: Tree, count: jax.Array, norms: jax.Array
    ) -> tuple[jax.Array | bool, jax.Array]:
        """Whether the variance is to be frozen after this update."""
        if freeze_step is not None:
            return count >= freeze_step, norms
        norm = optax.tree.sum(nu).astype(jnp.float32)
        slot = count % memory
        before = norms[slot]
        stable = jnp.minimum(norm, before) >= _STABLE * jnp.maximum(norm, before)
        return (count > memory) & stable, norms.at[slot].set(norm)

    return optax.GradientTransformation(init_fn, update_fn)


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
    mesh: Mesh,
    specs: Tree | None = None,
    **settings: Any,
) -> optax.GradientTransformation:
    """`scale_by_onebit_adam` with a learning rate.

    Args:
        learning_rate: a number, or a schedule of optax.
        mesh: the mesh.
        specs: how parameters lie on it, see `Reduction`.
        **settings: those of `scale_by_onebit_adam`; `freeze_step` must be among them.
    """
    return optax.chain(
        scale_by_onebit_adam(mesh, specs, **settings),
        optax.scale_by_learning_rate(learning_rate),
    )


def _clip(updates: Tree, norm: jax.Array, most: float | None) -> Tree:
    if most is None:
        return updates
    # As optax does it, so that what it makes is the same to the bit.
    return jax.tree.map(lambda g: jnp.where(norm < most, g, g / norm * most), updates)


def _clip_each(updates: Tree, most: float | None) -> Tree:
    """Clip what each replica has, `[replicas, ...]`, by its own norm."""
    if most is None:
        return updates
    return jax.vmap(lambda own: _clip(own, optax.tree.norm(own), most))(updates)
