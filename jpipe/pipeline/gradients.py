"""Loss and gradients of a pipelined model."""

from typing import Any

import jax
from jax.sharding import Mesh

from jpipe.pipeline.losses import Loss
from jpipe.pipeline.stages import Params, Stages, Tree
from jpipe.pipeline.step import Settings, Step
from jpipe.schedule.table import Schedule


def pipeline_value_and_grad(
    stages: Stages,
    loss: Loss,
    mesh: Mesh,
    schedule: Schedule | str = "1f1b",
    *,
    has_aux: bool = False,
    per_replica: bool = False,
    verify: bool = False,
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
        verify: whether to send a CRC32 with each payload from stage to stage, and compare it where
            the payload is read. There is one more result then, the last: an int32 array with a dim
            for each axis of the mesh, see `describe_mismatches`. What is gathered or summed over
            devices, such as gradients over `data`, is not verified.

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
    settings = Settings(stages, loss, mesh, schedule, has_aux, per_replica, verify)

    def value_and_grad(
        params: Params,
        inputs: Tree,
        targets: Tree,
        state: Params | None = None,
        key: jax.Array | None = None,
        loss_scale: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        return Step(settings, params, inputs, targets, state, key, loss_scale).whole()

    return jax.jit(value_and_grad)
