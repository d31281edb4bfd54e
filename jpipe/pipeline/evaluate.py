"""Losses and outputs of a pipelined model, without gradients."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.mesh import STAGE, has_explicit_axes
from jpipe.pipeline import checks, stash
from jpipe.pipeline.check_model import check_loss, check_outputs
from jpipe.pipeline.examples import (
    check_examples,
    counted,
    from_microbatches,
    to_microbatches,
    which_count,
)
from jpipe.pipeline.forward import run_forward
from jpipe.pipeline.layout import batch_spec
from jpipe.pipeline.losses import Loss, LossTerms, add_terms, loss_terms, no_terms
from jpipe.pipeline.placed import Placed
from jpipe.pipeline.stages import Params, Stages, Tree
from jpipe.pipeline.state import Variables


def pipeline_evaluate(
    stages: Stages,
    loss: Loss,
    mesh: Mesh,
    *,
    has_aux: bool = False,
    microbatch_size: int | None = None,
) -> jax.stages.Wrapped:
    """The mean loss, by a pipeline without backwards.

    Args:
        stages: the model.
        loss: `(outputs, targets) -> scalar`, the mean loss of a microbatch, or `-> LossTerms`.
        mesh: has the axis `stage`, and may have `data` and `model`.
        has_aux: whether to return `LossTerms.aux` as well.
        microbatch_size: to take any number of examples: inputs and targets are then `[N, ...]`, cut
            into microbatches of this size, and the last one is filled with examples that do not
            count. The loss is then asked for each example on its own.

    Returns:
        A jitted `(params, inputs, targets, state=None, key=None) -> loss`, or `-> (loss, aux)` with
        `has_aux`; inputs and targets are pytrees of `[M, microbatch, ...]` arrays, the loss a
        float32 scalar. State is read, not updated. It raises ValueError as
        `pipeline_value_and_grad` does.

    Raises:
        ValueError: if the mesh lacks `stage`.
    """
    checks.check_mesh(mesh)

    def evaluate(
        params: Params,
        inputs: Tree,
        targets: Tree,
        state: Params | None = None,
        key: jax.Array | None = None,
    ) -> Any:
        own_loss = loss
        if microbatch_size is not None:
            count = check_examples(microbatch_size, inputs=inputs, targets=targets)
            inputs, targets = to_microbatches((inputs, targets), microbatch_size)
            targets = targets, which_count(count, microbatch_size)
            own_loss = counted(loss)
        checks.check_batch(mesh, inputs=inputs, targets=targets)
        placed = Placed(stages, mesh, params, state, inputs, key, moves=False)
        check_loss(own_loss, placed.outputs, targets, has_aux=has_aux)

        def on_stage(
            variables: Variables, key: jax.Array | None, inputs: Tree, targets: Tree
        ) -> Any:
            def terms_of(outputs: Tree, i: jax.Array | int) -> LossTerms:
                return loss_terms(own_loss(outputs, stash.read(targets, i)))

            def add(terms: LossTerms, outputs: Tree, i: jax.Array) -> LossTerms:
                return add_terms(terms, terms_of(outputs, i))

            def nothing(outputs: Tree) -> LossTerms:
                return no_terms(jax.eval_shape(terms_of, outputs, 0))

            terms = run_forward(
                stages.parts,
                mesh.shape[STAGE],
                placed.gather(variables),
                placed.body_shapes,
                key,
                inputs,
                add,
                nothing,
            )
            total, weight, aux = jax.lax.psum(terms, tuple(placed.manual))
            return (total / weight, aux) if has_aux else total / weight

        return placed.run(on_stage, PartitionSpec(), targets)

    return jax.jit(evaluate)


def pipeline_predict(
    stages: Stages, mesh: Mesh, *, microbatch_size: int | None = None
) -> jax.stages.Wrapped:
    """The model's outputs, by a pipeline without backwards.

    Args:
        stages: the model.
        mesh: has the axis `stage`, and may have `data` and `model`.
        microbatch_size: to take any number of examples: inputs and outputs are then `[N, ...]`.

    Returns:
        A jitted `(params, inputs, state=None, key=None) -> outputs`; inputs are a pytree of
        `[M, microbatch, ...]` arrays, outputs what the head returns, each array with
        `[M, microbatch]` in front. State is read, not updated. It raises ValueError as
        `pipeline_value_and_grad` does.

    Raises:
        ValueError: if the mesh lacks `stage`.
    """
    checks.check_mesh(mesh)

    def predict(
        params: Params, inputs: Tree, state: Params | None = None, key: jax.Array | None = None
    ) -> Tree:
        if microbatch_size is not None:
            count = check_examples(microbatch_size, inputs=inputs)
            inputs = to_microbatches(inputs, microbatch_size)
        num_microbatches = checks.check_batch(mesh, inputs=inputs)
        placed = Placed(stages, mesh, params, state, inputs, key, moves=False)
        check_outputs(placed.outputs)

        def on_stage(variables: Variables, key: jax.Array | None, inputs: Tree) -> Tree:
            def keep(buffers: Tree, outputs: Tree, i: jax.Array) -> Tree:
                return stash.write(buffers, i, outputs)

            def nothing(outputs: Tree) -> Tree:
                return stash.empty(num_microbatches, outputs)

            kept = run_forward(
                stages.parts,
                mesh.shape[STAGE],
                placed.gather(variables),
                placed.body_shapes,
                key,
                inputs,
                keep,
                nothing,
            )
            return jax.tree.map(lambda a: a[None], kept)

        by_stage = placed.run(on_stage, PartitionSpec(STAGE, *batch_spec(mesh)))
        if has_explicit_axes(mesh):  # which cannot index a dim that is sharded
            whole = NamedSharding(mesh, PartitionSpec(None, *batch_spec(mesh)))
            by_stage = jax.tree.map(lambda a: jax.reshard(a, whole), by_stage)
        outputs = jax.tree.map(lambda a: a[-1], by_stage)  # the last stage has them
        return outputs if microbatch_size is None else from_microbatches(outputs, count)

    return jax.jit(predict)
