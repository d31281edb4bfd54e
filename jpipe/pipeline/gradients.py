"""Loss and gradients of a pipelined model."""

from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jpipe.mesh import STAGE
from jpipe.pipeline import checks
from jpipe.pipeline.executor import Executor
from jpipe.pipeline.layout import batch_spec, gather_params, lay_out, param_specs, reduce_grads
from jpipe.pipeline.losses import Loss
from jpipe.pipeline.retrace import warn_if_compiled_again
from jpipe.pipeline.stages import Params, Stages, Tree, shapes_of
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
) -> jax.stages.Wrapped:
    """Like `jax.value_and_grad` of the mean loss, by a pipeline over the mesh's `stage` axis.

    Loss and gradients are those of one device that accumulates over the microbatches in order.
    Sums over microbatches are made in float32 (float64 for float64 parameters), and so are the
    sums over the `data` axis.

    Args:
        stages: the model.
        loss: `(outputs, targets) -> scalar`, the mean loss of a microbatch, or `-> LossTerms`, a
            sum and what to divide it by.
        mesh: has the axis `stage`, and may have `data`, over which each microbatch is split.
        schedule: a table, or the name of one of `jpipe.schedule.SCHEDULES`, which is then built
            for the number of microbatches of each batch.
        has_aux: whether to return `LossTerms.aux` as well.

    Returns:
        A jitted `(params, inputs, targets) -> (loss, gradients)`, or `-> ((loss, aux), gradients)`
        with `has_aux`. Inputs and targets are pytrees of `[M, microbatch, ...]` arrays. The loss is
        a float32 scalar, the mean over microbatches or the weighted mean over all they hold; the
        gradients have the structure and sharding of `params` (see `param_shardings`) and are at
        least float32. It raises ValueError, before anything compiles, if the data does not fit the
        mesh or the schedule, or if the pieces of the model do not fit each other.

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

    def value_and_grad(params: Params, inputs: Tree, targets: Tree) -> tuple[Any, Params]:
        params = checks.as_params(params)
        num_microbatches = checks.check_batch(mesh, inputs=inputs, targets=targets)
        table = schedule
        if isinstance(table, str):
            table = make_schedule(table, mesh.shape[STAGE], num_microbatches)
        checks.check_schedule_fits(table, mesh, num_microbatches)
        checks.check_params(params, mesh)
        checks.check_stages(stages, params, inputs, mesh)
        checks.check_loss(stages, loss, params, inputs, targets, has_aux=has_aux)
        shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves((params, inputs, targets)))
        warn_if_compiled_again(stages, loss, table.name, mesh, shapes)

        specs = param_specs(mesh, params)
        body_shapes = shapes_of(params.body)
        params, inputs, targets = lay_out(mesh, params, inputs, targets)

        def on_stage(params: Params, inputs: Tree, targets: Tree) -> tuple[Any, Params]:
            whole = gather_params(params, specs)
            terms, grads = Executor(
                stages, loss, table, STAGE, whole, body_shapes, inputs, targets
            ).run()
            total, weight, aux = jax.lax.psum(terms, mesh.axis_names)  # 0 but on the last stage
            # So far the gradients are of the total divided by M.
            scale = num_microbatches / weight
            grads = jax.tree.map(lambda g: g * scale, reduce_grads(grads, params, specs, mesh))
            return ((total / weight, aux) if has_aux else total / weight), grads

        return jax.shard_map(
            on_stage,
            mesh=mesh,
            in_specs=(specs, batch_spec(mesh), batch_spec(mesh)),
            out_specs=(PartitionSpec(), specs),
            check_vma=False,
        )(params, inputs, targets)

    return jax.jit(value_and_grad)
