"""One training step: the pipeline's gradients and an optax update, in one compiled program."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.mesh import DATA, has_explicit_axes
from jpipe.optim.all_reduce import wants_gradient_of_each_replica
from jpipe.optim.loss_scale import keep_if, loss_scale_state
from jpipe.optim.per_device import place_per_device
from jpipe.pipeline import (
    INTACT,
    Loss,
    Params,
    Segments,
    Stages,
    batch_sharding,
    param_shardings,
    pipeline_segments,
    pipeline_value_and_grad,
)
from jpipe.reference import reference_value_and_grad
from jpipe.schedule import Schedule

Tree = Any


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
        step: int32 scalar, steps made so far, those that a loss scale skipped included.
        params: the parameters.
        opt_state: the optimizer's state, made for parameters of at least float32.
        model_state: what else the model has, such as running statistics; None if nothing.
        key: a typed PRNG key, from which those of all steps follow; None if nothing is random.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    model_state: Params | None = None
    key: jax.Array | None = None


Init = Callable[[], Params | tuple[Params, Params]]
"""Makes the parameters, or parameters and state."""


class Metrics(NamedTuple):
    """What a step reports; loss, norm and scale are float32 scalars.

    Attributes:
        loss: mean loss of the batch, before the update.
        grad_norm: global norm of the gradients, before the optimizer clips them; if it takes their
            mean over the replicas by itself, the root mean square of the norms of the replicas.
        aux: what else the loss reports, see `jpipe.pipeline.LossTerms`.
        loss_scale: what the loss was multiplied by for the backward; loss and norm are not.
        skipped: boolean scalar, whether the gradients were not finite and `dynamic_loss_scale` left
            parameters, optimizer and the model's state as they were.
        mismatches: what was damaged on its way between stages, for `describe_mismatches`; if there
            is anything but `INTACT`, the whole state is as it was, and everything else that is
            reported here means nothing. None if nothing was verified.
    """

    loss: jax.Array
    grad_norm: jax.Array
    aux: Tree
    loss_scale: jax.Array
    skipped: jax.Array
    mismatches: jax.Array | None = None


def state_shardings(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    partition: Params | None = None,
) -> TrainState:
    """How a training state lies on the mesh: what belongs to a parameter lies where it does.

    Args:
        state: the state, or its shapes and dtypes.
        optimizer: the optax optimizer that it is for.
        mesh: the mesh, with a `stage` axis.
        partition: how parameters lie over other axes, see `jpipe.pipeline.Stages`.

    Returns:
        A `TrainState` of shardings.
    """
    params = state.params
    everywhere = NamedSharding(mesh, PartitionSpec())
    of_params = param_shardings(mesh, params, partition)

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
    opt_state = place_per_device(mesh, state.opt_state, opt_state)
    of_state = state.model_state and param_shardings(mesh, state.model_state)
    of_key = None if state.key is None else everywhere
    shardings: Any = (everywhere, of_params, opt_state, of_state, of_key)
    return TrainState(*shardings)


def init_train_state(
    init: Init,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    key: jax.Array | None = None,
    partition: Params | None = None,
) -> TrainState:
    """A fresh training state, laid out on the mesh.

    Args:
        init: makes the parameters, or parameters and state; traced.
        optimizer: an optax optimizer.
        mesh: the mesh, with a `stage` axis.
        key: a typed PRNG key for models that draw random numbers, such as dropout.
        partition: the model's `Stages.partition`, if it has one.
    """
    make = jax.jit(lambda key: _lay_out(_fresh(init, optimizer, key), optimizer, mesh, partition))
    with jax.set_mesh(mesh) if has_explicit_axes(mesh) else contextlib.nullcontext():
        state: TrainState = make(key)
    return state


def abstract_train_state(
    init: Init,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    *,
    key: jax.Array | None = None,
    partition: Params | None = None,
) -> TrainState:
    """Shapes, dtypes and places of a fresh training state, to compile a step without one.

    Args:
        init: makes the parameters, or parameters and state; traced.
        optimizer: an optax optimizer.
        mesh: the mesh, with a `stage` axis; None for one device.
        key: as for `init_train_state`.
        partition: as for `init_train_state`.
    """
    state: TrainState = jax.eval_shape(lambda: _fresh(init, optimizer, key))
    if mesh is None:
        return state

    def place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, state, state_shardings(state, optimizer, mesh, partition))


def _fresh(
    init: Init, optimizer: optax.GradientTransformation, key: jax.Array | None
) -> TrainState:
    made: Any = init()
    params, model_state = (made, None) if isinstance(made, Params) else made
    opt_state = optimizer.init(_at_least_float32(params))
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, model_state, key)


def _at_least_float32(params: Params) -> Params:
    """Parameters as the optimizer's state sees them: like the gradients, never below float32."""
    return jax.tree.map(lambda p: p.astype(jnp.promote_types(p.dtype, jnp.float32)), params)


def _lay_out(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    partition: Params | None,
) -> TrainState:
    shardings = state_shardings(state, optimizer, mesh, partition)
    if has_explicit_axes(mesh):
        return jax.tree.map(jax.reshard, state, shardings)
    return jax.lax.with_sharding_constraint(state, shardings)


def make_train_step(
    stages: Stages,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    schedule: Schedule | str = "1f1b",
    *,
    verify: bool = False,
) -> jax.stages.Wrapped:
    """A training step by a pipeline.

    The optimizer sees the gradients of all stages at once, each once: a norm over all of them is
    the norm of the whole model's gradient, whatever the mesh. If it begins with
    `jpipe.optim.compressed_all_reduce` or is `onebit_adam`, it sees those of each replica, see
    `per_replica` of `pipeline_value_and_grad`. If it is a `dynamic_loss_scale`, the loss is scaled.

    Args:
        stages: the model.
        loss: `(outputs, targets) -> scalar`, the mean loss of a microbatch, or `-> LossTerms`.
        optimizer: an optax optimizer.
        mesh: has the axis `stage`, and may have `data` and `model`.
        schedule: a table or the name of one, as for `pipeline_value_and_grad`.
        verify: whether to compare what stages send each other with its CRC32, see
            `pipeline_value_and_grad`.

    Returns:
        A jitted `(state, inputs, targets) -> (state, metrics)`; inputs and targets are pytrees of
        `[M, microbatch, ...]` arrays. The state passed in is donated: its buffers become those of
        the state that comes back. On simulated devices wait for each step before the next: XLA on
        the CPU aborts if several steps in flight keep each other waiting.

    Raises:
        ValueError: as `pipeline_value_and_grad`.
    """
    value_and_grad, value_and_grads = (
        pipeline_value_and_grad(
            stages, loss, mesh, schedule, has_aux=True, per_replica=each, verify=verify
        )
        for each in (False, True)
    )

    def train_step(state: TrainState, inputs: Tree, targets: Tree) -> tuple[TrainState, Metrics]:
        apart = wants_gradient_of_each_replica(state.opt_state)
        function = value_and_grads if apart else value_and_grad
        new, metrics = _update(
            function, optimizer, state, inputs, targets, _num_replicas(state, mesh), verify
        )
        return _lay_out(new, optimizer, mesh, stages.partition), metrics

    batch = batch_sharding(mesh)
    return jax.jit(train_step, donate_argnums=0, in_shardings=(None, batch, batch))


class SegmentedStep(NamedTuple):
    """A training step cut into segments, each a jitted function; see `make_segmented_step`.

    Attributes:
        start: `(state, inputs, targets) -> carry`.
        advance: `(carry, first, state, inputs, targets) -> carry`; donates the carry.
        finish: `(carry, state, inputs, targets) -> (state, metrics)`; donates carry and state.
        mismatches: `carry -> array`, as `Metrics.mismatches`; for verified steps.
        firsts: what `first` is in each segment.
    """

    start: jax.stages.Wrapped
    advance: jax.stages.Wrapped
    finish: jax.stages.Wrapped
    mismatches: jax.stages.Wrapped
    firsts: range


def make_segmented_step(
    stages: Stages,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    schedule: Schedule,
    microbatches: int,
    *,
    verify: bool = False,
) -> SegmentedStep:
    """The step of `make_train_step` in segments, with the same bits.

    Between two of them the carry and the state that the step began with are all there is to save.

    Args:
        stages: the model.
        loss: as for `make_train_step`.
        optimizer: an optax optimizer.
        mesh: the mesh; every device must run a program of its own, see `pipeline_segments`.
        schedule: the table.
        microbatches: about so many microbatches are finished in a segment.
        verify: as for `make_train_step`.

    Raises:
        ValueError: as `pipeline_segments`.
    """
    segments, segments_apart = (
        pipeline_segments(
            stages,
            loss,
            mesh,
            schedule,
            microbatches=microbatches,
            has_aux=True,
            per_replica=each,
            verify=verify,
        )
        for each in (False, True)
    )

    def of(state: TrainState) -> Segments:
        return segments_apart if wants_gradient_of_each_replica(state.opt_state) else segments

    def start(state: TrainState, inputs: Tree, targets: Tree) -> Tree:
        return of(state).start(*_arguments(state, inputs, targets))

    def advance(carry: Tree, first: Any, state: TrainState, inputs: Tree, targets: Tree) -> Tree:
        return of(state).advance(carry, first, *_arguments(state, inputs, targets))

    def finish(
        carry: Tree, state: TrainState, inputs: Tree, targets: Tree
    ) -> tuple[TrainState, Metrics]:
        function = functools.partial(of(state).finish, carry)
        new, metrics = _update(
            function, optimizer, state, inputs, targets, _num_replicas(state, mesh), verify
        )
        return _lay_out(new, optimizer, mesh, stages.partition), metrics

    batch, own = batch_sharding(mesh), NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    return SegmentedStep(
        jax.jit(start, in_shardings=(None, batch, batch), out_shardings=own),
        jax.jit(
            advance,
            donate_argnums=0,
            in_shardings=(own, None, None, batch, batch),
            out_shardings=own,
        ),
        jax.jit(finish, donate_argnums=(0, 1), in_shardings=(own, None, batch, batch)),
        jax.jit(lambda carry: carry.mismatch, out_shardings=NamedSharding(mesh, PartitionSpec())),
        segments.firsts,
    )


def make_reference_step(
    stages: Stages, loss: Loss, optimizer: optax.GradientTransformation
) -> jax.stages.Wrapped:
    """The same step on one device, without a pipeline; takes and returns what a step does."""
    value_and_grad = reference_value_and_grad(stages, loss, has_aux=True)

    def train_step(state: TrainState, inputs: Tree, targets: Tree) -> tuple[TrainState, Metrics]:
        return _update(value_and_grad, optimizer, state, inputs, targets)

    return jax.jit(train_step, donate_argnums=0)


def _arguments(state: TrainState, inputs: Tree, targets: Tree) -> tuple[Any, ...]:
    """Those of `pipeline_value_and_grad`."""
    scaling = loss_scale_state(state.opt_state)
    scale = None if scaling is None else scaling.scale
    key = None if state.key is None else jax.random.fold_in(state.key, state.step)
    return state.params, inputs, targets, state.model_state, key, scale


def _num_replicas(state: TrainState, mesh: Mesh) -> int:
    """How many have gradients of their own."""
    return mesh.shape.get(DATA, 1) if wants_gradient_of_each_replica(state.opt_state) else 1


def _update(
    value_and_grad: Callable[..., tuple[Any, ...]],
    optimizer: optax.GradientTransformation,
    state: TrainState,
    inputs: Tree,
    targets: Tree,
    replicas: int = 1,
    verify: bool = False,
) -> tuple[TrainState, Metrics]:
    arguments = _arguments(state, inputs, targets)
    scale = arguments[-1]
    (value, aux), grads, *rest = value_and_grad(*arguments)
    mismatches = rest.pop() if verify else None
    unscaled = grads if scale is None else jax.tree.map(lambda g: g / scale, grads)
    norm = optax.tree.norm(unscaled) / replicas**0.5
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    model_state = rest[0] if rest else None
    after = loss_scale_state(opt_state)
    if scale is None or after is None:
        scale, skipped = jnp.float32(1), jnp.bool_(False)
    else:
        skipped = after.skipped_in_a_row > 0
        model_state = keep_if(~skipped, model_state, state.model_state)
    new = TrainState(state.step + 1, params, opt_state, model_state, state.key)
    if mismatches is not None:
        new = keep_if(jnp.all(mismatches == INTACT), new, state)
    return new, Metrics(value, norm, aux, scale, skipped, mismatches)
