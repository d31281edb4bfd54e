"""Losses and outputs of a pipelined model, without gradients."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.mesh import STAGE, has_explicit_axes
from jpipe.pipeline import checks, stash
from jpipe.pipeline.forward import run_forward
from jpipe.pipeline.layout import batch_spec, gather_params, lay_out, param_specs
from jpipe.pipeline.losses import Loss, LossTerms, add_terms, loss_terms, no_terms
from jpipe.pipeline.stages import Params, Stages, Tree, shapes_of


def pipeline_evaluate(
    stages: Stages, loss: Loss, mesh: Mesh, *, has_aux: bool = False
) -> jax.stages.Wrapped:
    """The mean loss, by a pipeline without backwards.

    Args:
        stages: the model.
        loss: `(outputs, targets) -> scalar`, the mean loss of a microbatch, or `-> LossTerms`.
        mesh: has the axis `stage`, and may have `data`.
        has_aux: whether to return `LossTerms.aux` as well.

    Returns:
        A jitted `(params, inputs, targets) -> loss`, or `-> (loss, aux)` with `has_aux`; inputs
        and targets are pytrees of `[M, microbatch, ...]` arrays, the loss a float32 scalar. It
        raises ValueError as `pipeline_value_and_grad` does.

    Raises:
        ValueError: if the mesh lacks `stage`.
    """
    checks.check_mesh(mesh)

    def evaluate(params: Params, inputs: Tree, targets: Tree) -> Any:
        params = checks.as_params(params)
        checks.check_batch(mesh, inputs=inputs, targets=targets)
        checks.check_params(params, mesh)
        checks.check_stages(stages, params, inputs, mesh)
        checks.check_loss(stages, loss, params, inputs, targets, has_aux=has_aux)

        specs, body_shapes = param_specs(mesh, params), shapes_of(params.body)
        params, inputs, targets = lay_out(mesh, params, inputs, targets)

        def on_stage(params: Params, inputs: Tree, targets: Tree) -> Any:
            whole = gather_params(params, specs)

            def terms_of(outputs: Tree, i: jax.Array | int) -> LossTerms:
                return loss_terms(loss(outputs, stash.read(targets, i)))

            def add(terms: LossTerms, outputs: Tree, i: jax.Array) -> LossTerms:
                return add_terms(terms, terms_of(outputs, i))

            top = stages.top(body_shapes, stages.boundary(whole.stem, inputs))
            shapes = jax.eval_shape(lambda p, y: terms_of(stages.head(p, y), 0), whole.head, top)
            terms = run_forward(
                stages, mesh.shape[STAGE], whole, body_shapes, inputs, add, no_terms(shapes)
            )
            total, weight, aux = jax.lax.psum(terms, mesh.axis_names)
            return (total / weight, aux) if has_aux else total / weight

        return jax.shard_map(
            on_stage,
            mesh=mesh,
            in_specs=(specs, batch_spec(mesh), batch_spec(mesh)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(params, inputs, targets)

    return jax.jit(evaluate)


def pipeline_predict(stages: Stages, mesh: Mesh) -> jax.stages.Wrapped:
    """The model's outputs, by a pipeline without backwards.

    Args:
        stages: the model.
        mesh: has the axis `stage`, and may have `data`.

    Returns:
        A jitted `(params, inputs) -> outputs`; inputs are a pytree of `[M, microbatch, ...]`
        arrays, outputs what the head returns, each array with `[M, microbatch]` in front. It
        raises ValueError as `pipeline_value_and_grad` does.

    Raises:
        ValueError: if the mesh lacks `stage`.
    """
    checks.check_mesh(mesh)

    def predict(params: Params, inputs: Tree) -> Tree:
        params = checks.as_params(params)
        num_microbatches = checks.check_batch(mesh, inputs=inputs)
        checks.check_params(params, mesh)
        checks.check_stages(stages, params, inputs, mesh)

        checks.check_outputs(stages, params, inputs)
        specs, body_shapes = param_specs(mesh, params), shapes_of(params.body)
        params, inputs = lay_out(mesh, params, inputs)

        def on_stage(params: Params, inputs: Tree) -> Tree:
            whole = gather_params(params, specs)
            top = stages.top(body_shapes, stages.boundary(whole.stem, inputs))
            outputs = jax.eval_shape(stages.head, whole.head, top)
            empty = stash.empty(num_microbatches, outputs)

            def keep(buffers: Tree, outputs: Tree, i: jax.Array) -> Tree:
                return stash.write(buffers, i, outputs)

            kept = run_forward(stages, mesh.shape[STAGE], whole, body_shapes, inputs, keep, empty)
            return jax.tree.map(lambda a: a[None], kept)

        spec = PartitionSpec(STAGE, *batch_spec(mesh))
        by_stage = jax.shard_map(
            on_stage,
            mesh=mesh,
            in_specs=(specs, batch_spec(mesh)),
            out_specs=spec,
            check_vma=False,
        )(params, inputs)
        if has_explicit_axes(mesh):  # which cannot index a dim that is sharded
            whole = NamedSharding(mesh, PartitionSpec(None, *batch_spec(mesh)))
            by_stage = jax.tree.map(lambda a: jax.reshard(a, whole), by_stage)
        return jax.tree.map(lambda a: a[-1], by_stage)  # the last stage has the outputs

    return jax.jit(predict)
