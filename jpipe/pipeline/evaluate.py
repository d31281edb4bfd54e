"""Losses and outputs of a pipelined model, without gradients."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jpipe.mesh import DATA, STAGE
from jpipe.pipeline import checks, stash
from jpipe.pipeline.forward import run_forward
from jpipe.pipeline.layout import batch_spec, gather_params, param_specs
from jpipe.pipeline.stages import Loss, Params, Stages, Tree


def pipeline_evaluate(stages: Stages, loss: Loss, mesh: Mesh) -> jax.stages.Wrapped:
    """The mean loss, by a pipeline without backwards.

    Args:
        stages: the model.
        loss: `(outputs, targets) -> scalar`, the mean loss of a microbatch.
        mesh: has the axis `stage`, and may have `data`.

    Returns:
        A jitted `(params, inputs, targets) -> loss`; inputs and targets are pytrees of
        `[M, microbatch, ...]` arrays, the loss a float32 scalar. It raises ValueError as
        `pipeline_value_and_grad` does.

    Raises:
        ValueError: if the mesh lacks `stage`.
    """
    checks.check_mesh(mesh)
    num_data = mesh.shape.get(DATA, 1)

    def evaluate(params: Params, inputs: Tree, targets: Tree) -> jax.Array:
        params = Params(*params)
        num_microbatches = checks.check_batch(mesh, inputs=inputs, targets=targets)
        checks.check_params(params, mesh)
        checks.check_stages(stages, params, inputs, mesh)
        checks.check_loss(stages, loss, params, inputs, targets)

        specs = param_specs(mesh, params)

        def on_stage(params: Params, inputs: Tree, targets: Tree) -> jax.Array:
            whole = gather_params(params, specs)

            def add(total: jax.Array, outputs: Tree, i: jax.Array) -> jax.Array:
                return total + loss(outputs, stash.read(targets, i)).astype(jnp.float32)

            nothing = jnp.zeros((), jnp.float32)
            total = run_forward(stages, STAGE, mesh.shape[STAGE], whole, inputs, add, nothing)
            return jax.lax.psum(total, mesh.axis_names) / (num_data * num_microbatches)

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
        params = Params(*params)
        num_microbatches = checks.check_batch(mesh, inputs=inputs)
        checks.check_params(params, mesh)
        checks.check_stages(stages, params, inputs, mesh)

        specs = param_specs(mesh, params)

        def on_stage(params: Params, inputs: Tree) -> Tree:
            whole = gather_params(params, specs)
            x = stages.boundary(whole.stem, inputs)
            outputs = jax.eval_shape(stages.head, whole.head, x)
            empty = stash.empty(num_microbatches, outputs)

            def keep(buffers: Tree, outputs: Tree, i: jax.Array) -> Tree:
                return stash.write(buffers, i, outputs)

            kept = run_forward(stages, STAGE, mesh.shape[STAGE], whole, inputs, keep, empty)
            return jax.tree.map(lambda a: a[None], kept)

        spec = PartitionSpec(STAGE, *batch_spec(mesh))
        by_stage = jax.shard_map(
            on_stage,
            mesh=mesh,
            in_specs=(specs, batch_spec(mesh)),
            out_specs=spec,
            check_vma=False,
        )(params, inputs)
        return jax.tree.map(lambda a: a[-1], by_stage)  # the last stage has the outputs

    return jax.jit(predict)
