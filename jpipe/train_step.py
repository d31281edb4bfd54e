"""One training step: the pipeline's gradients and an optax update, in one compiled program."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.mesh import has_explicit_axes
from jpipe.pipeline import (
    Loss,
    Params,
    Stages,
    batch_sharding,
    param_shardings,
    pipeline_value_and_grad,
)
from jpipe.reference import reference_value_and_grad
from jpipe.schedule import Schedule

Tree = Any


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
        step: int32 scalar, optimizer updates made so far.
        params: the parameters.
        opt_state: the optimizer's state, made for parameters of at least float32.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState


class Metrics(NamedTuple):
    """What a step reports; loss and norm are float32 scalars.

    Attributes:
        loss: mean loss of the batch, before the update.
        grad_norm: global norm of the gradients, before the optimizer clips them.
        aux: what else the loss reports, see `jpipe.pipeline.LossTerms`.
    """

    loss: jax.Array
    grad_norm: jax.Array
    aux: Tree = ()


def state_shardings(
    params: Params, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """How a training state lies on the mesh: what belongs to a parameter lies where it does.

    Args:
        params: the parameters, or their shapes and dtypes.
        optimizer: an optax optimizer.
        mesh: the mesh, with a `stage` axis.

    Returns:
        A `TrainState` of shardings.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    of_params = param_shardings(mesh, params)

    def place(leaf: Any, param: Any, sharding: NamedSharding) -> Any:
        # Not all that belongs to a parameter has its shape: Adafactor keeps rows and columns, SM3 a
        # list of them, and a mask leaves an empty node.
        if not hasattr(leaf, "shape"):
            return jax.tree.map(lambda _: everywhere, leaf)
        return sharding if leaf.shape == param.shape else everywhere

    opt_state = optax.tree.map_params(
        optimizer,
        place,
        jax.eval_shape(lambda p: optimizer.init(_at_least_float32(p)), params),
        params,
        of_params,
        transform_non_params=lambda _: everywhere,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode | list),
    )
    shardings: Any = (everywhere, of_params, opt_state)
    return TrainState(*shardings)


def init_train_state(
    init: Callable[[], Params], optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """A fresh training state, laid out on the mesh.

    Args:
        init: makes the parameters; traced.
        optimizer: an optax optimizer.
        mesh: the mesh, with a `stage` axis.
    """
    make = jax.jit(lambda: _lay_out(_fresh(init, optimizer), optimizer, mesh))
    with jax.set_mesh(mesh) if has_explicit_axes(mesh) else contextlib.nullcontext():
        state: TrainState = make()
    return state


def abstract_train_state(
    init: Callable[[], Params], optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """Shapes, dtypes and places of a fresh training state, to compile a step without one.

    Args:
        init: makes the parameters; traced.
        optimizer: an optax optimizer.
        mesh: the mesh, with a `stage` axis; None for one device.
    """
    state: TrainState = jax.eval_shape(lambda: _fresh(init, optimizer))
    if mesh is None:
        return state

    def place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, state, state_shardings(state.params, optimizer, mesh))


def _fresh(init: Callable[[], Params], optimizer: optax.GradientTransformation) -> TrainState:
    params = init()
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(_at_least_float32(params)))


def _at_least_float32(params: Params) -> Params:
    """Parameters as the optimizer's state sees them: like the gradients, never below float32."""
    return jax.tree.map(lambda p: p.astype(jnp.promote_types(p.dtype, jnp.float32)), params)


def _lay_out(state: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    shardings = state_shardings(state.params, optimizer, mesh)
    if has_explicit_axes(mesh):
        return jax.tree.map(jax.reshard, state, shardings)
    return jax.lax.with_sharding_constraint(state, shardings)


def make_train_step(
    stages: Stages,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    schedule: Schedule | str = "1f1b",
) -> jax.stages.Wrapped:
    """A training step by a pipeline.

    The optimizer sees the gradients of all stages at once, each once: a norm over all of them is
    the norm of the whole model's gradient, whatever the mesh.

    Args:
        stages: the model.
        loss: `(outputs, targets) -> scalar`, the mean loss of a microbatch, or `-> LossTerms`.
        optimizer: an optax optimizer.
        mesh: has the axis `stage`, and may have `data`.
        schedule: a table or the name of one, as for `pipeline_value_and_grad`.

    Returns:
        A jitted `(state, inputs, targets) -> (state, metrics)`; inputs and targets are pytrees of
        `[M, microbatch, ...]` arrays. The state passed in is donated: its buffers become those of
        the state that comes back. On simulated devices wait for each step before the next: XLA on
        the CPU aborts if several steps in flight keep each other waiting.

    Raises:
        ValueError: as `pipeline_value_and_grad`.
    """
    value_and_grad = pipeline_value_and_grad(stages, loss, mesh, schedule, has_aux=True)

    def train_step(state: TrainState, inputs: Tree, targets: Tree) -> tuple[TrainState, Metrics]:
        new, metrics = _update(value_and_grad, optimizer, state, inputs, targets)
        return _lay_out(new, optimizer, mesh), metrics

    batch = batch_sharding(mesh)
    return jax.jit(train_step, donate_argnums=0, in_shardings=(None, batch, batch))


def make_reference_step(
    stages: Stages, loss: Loss, optimizer: optax.GradientTransformation
) -> jax.stages.Wrapped:
    """The same step on one device, without a pipeline; takes and returns what a step does."""
    value_and_grad = reference_value_and_grad(stages, loss, has_aux=True)

    def train_step(state: TrainState, inputs: Tree, targets: Tree) -> tuple[TrainState, Metrics]:
        return _update(value_and_grad, optimizer, state, inputs, targets)

    return jax.jit(train_step, donate_argnums=0)


def _update(
    value_and_grad: Callable[[Params, Tree, Tree], tuple[tuple[jax.Array, Tree], Params]],
    optimizer: optax.GradientTransformation,
    state: TrainState,
    inputs: Tree,
    targets: Tree,
) -> tuple[TrainState, Metrics]:
    (value, aux), grads = value_and_grad(state.params, inputs, targets)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), Metrics(
        value, optax.tree.norm(grads), aux
    )
