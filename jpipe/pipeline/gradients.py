"""Loss and gradients of a pipelined model."""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jpipe.mesh import DATA, STAGE
from jpipe.pipeline import checks
from jpipe.pipeline.check_model import check_loss
from jpipe.pipeline.executor import Executor
from jpipe.pipeline.layout import lay_out, mean_state, share_grads, share_state
from jpipe.pipeline.losses import Loss
from jpipe.pipeline.per_stage import chunks_of
from jpipe.pipeline.placed import Placed
from jpipe.pipeline.retrace import warn_if_compiled_again
from jpipe.pipeline.stages import Params, Stages, Tree
from jpipe.pipeline.state import State, Variables
from jpipe.schedule.check import check_schedule
from jpipe.schedule.registry import make_schedule
from jpipe.schedule.table import Schedule


def pipeline_value_and_grad(
    stages: Stages,
    loss: Loss,
    mesh: Mesh,
    schedule: Schedule | str = "1f1b",
    *,
    has_aux: bool = False,
    per_replica: bool = False,
) -> jax.stages.Wrapped:
    """Like `jax.value_and_grad` of the mean loss, by a pipeline over the mesh's `stage` axis.

    Loss and gradients are those of one device that accumulates over the microbatches in order.
    Sums over microbatches are made in float32 (float64 for float64 parameters), and so are the
    sums over the `data` axis, except where XLA divides microbatches over it (models with state,
    random numbers or FSDP): there it sums each microbatch's gradient in the parameter's dtype.

    Args:
        stages: the model.
        loss: `(outputs, targets) -> scalar`, the mean loss of a microbatch, or `-> LossTerms`, a
            sum and what to divide it by.
        mesh: has the axis `stage`, and may have `data`, over which each microbatch is split, and
            `model`, over which XLA divides the work within a stage.
        schedule: a table, or the name of one of `jpipe.schedule.SCHEDULES`, which is then built
            for the number of microbatches of each batch and the chunks of the model (`interleaved`
            of a model without chunks is `1f1b-overlap`).
        has_aux: whether to return `LossTerms.aux` as well.
        per_replica: whether to leave the gradients of the replicas along `data` apart, for an
            optimizer that takes their mean by itself, such as `jpipe.optim.compressed_all_reduce`.
            Replicas then exchange nothing during a step: batch statistics are those of a replica's
            own examples, its random numbers its own, and moving state ends as the mean over them.

    Returns:
        A jitted `(params, inputs, targets, state=None, key=None, loss_scale=None)
        -> (loss, gradients)`, or `-> ((loss, aux), gradients)` with `has_aux`, or with the new
        state as a third result if `state` is given. Inputs and targets are pytrees of
        `[M, microbatch, ...]` arrays, `state` a `Params` and `key` a typed PRNG key, see
        `Stages.stateful`; `loss_scale` is a float32 scalar by which the gradients are multiplied
        from the loss on, so that they survive in float16, and not the loss. The loss is a float32
        scalar, the mean over microbatches or the weighted mean over all they hold; the gradients
        have the structure and sharding of `params` (see `param_shardings`) and are at least
        float32; with `per_replica` they are `[replicas, ...]` arrays, of which the mean is the
        gradient. It raises ValueError, before anything compiles, if the data does not fit the mesh
        or the schedule, or if the pieces of the model do not fit each other.

    Raises:
        ValueError: if the mesh lacks `stage`, the schedule's name is unknown, or the table is
            wrong.
    """
    checks.check_mesh(mesh)
    if isinstance(schedule, str):
        make_schedule(schedule, mesh.shape[STAGE], 1)  # refuses an unknown name
    else:
        check_schedule(schedule)
        checks.check_trains(schedule)

    def value_and_grad(
        params: Params,
        inputs: Tree,
        targets: Tree,
        state: Params | None = None,
        key: jax.Array | None = None,
        loss_scale: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        stored = checks.as_params(params)
        num_microbatches = checks.check_batch(mesh, inputs=inputs, targets=targets)
        table = schedule
        num_chunks = len(chunks_of(stored.body))
        if isinstance(table, str):
            table = make_schedule(table, mesh.shape[STAGE], num_microbatches, num_chunks)
        checks.check_schedule_fits(table, mesh, num_microbatches, num_chunks)
        placed = Placed(
            stages, mesh, stored, state, inputs, key, moves=True, per_replica=per_replica
        )
        num_replicas = mesh.shape.get(DATA, 1)
        draws_apart = per_replica and num_replicas > 1
        check_loss(loss, placed.outputs, targets, has_aux=has_aux)
        leaves = jax.tree.leaves((placed.variables, inputs, targets))
        shapes = tuple((a.shape, str(a.dtype)) for a in leaves)
        warn_if_compiled_again(stages, loss, table.name, mesh, shapes)

        def on_stage(
            variables: Variables,
            key: jax.Array | None,
            inputs: Tree,
            targets: Tree,
            loss_scale: jax.Array | None,
        ) -> tuple[Any, Params, Params]:
            own, shapes = placed.gather(variables), placed.body_shapes
            if key is not None and draws_apart:
                key = jax.random.fold_in(key, jax.lax.axis_index(DATA))
            terms, grads, moving = Executor(
                stages.parts, loss, table, STAGE, own, shapes, key, loss_scale, inputs, targets
            ).run()
            total, weight, aux = jax.lax.psum(
                terms, tuple(placed.manual)
            )  # 0 but on the last stage
            # So far the gradients are of the total divided by M.
            scale = num_microbatches / weight
            grads = share_grads(grads, variables.params, placed.specs.params)
            if per_replica:
                # The mean over replicas is to be what otherwise is their sum.
                grads = jax.tree.map(lambda g: g[None] * (scale * num_replicas), grads)
                moving = mean_state(moving, DATA) if num_replicas > 1 else moving
            else:
                grads = jax.lax.psum(grads, DATA) if DATA in placed.manual else grads
                grads = jax.tree.map(lambda g: g * scale, grads)
            moving = share_state(moving, variables.moving, placed.specs.moving)
            return ((total / weight, aux) if has_aux else total / weight), grads, moving

        specs = placed.specs
        of_grads = placed.replica_specs if per_replica else specs.params
        value, grads, moving = placed.run(
            on_stage,
            (PartitionSpec(), of_grads, specs.moving),
            targets,
            scalars=(loss_scale,),
        )
        if stages.partition is not None:
            (grads,) = lay_out(mesh, grads, of_grads)
        tied_back = functools.partial(stages.tied_back, stored=stored)
        grads = jax.vmap(tied_back)(grads) if per_replica else tied_back(grads)
        if state is None:
            return value, grads
        return value, grads, State(moving, placed.variables.constant).whole()

    return jax.jit(value_and_grad)
