"""Losses and outputs of a pipelined model, without gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.mesh import STAGE, has_explicit_axes
from jpipe.pipeline import checks, stash
from jpipe.pipeline.examples import check_examples, counted, from_microbatches, to_microbatches
from jpipe.pipeline.forward import run_forward
from jpipe.pipeline.layout import (
    batch_spec,
    gather_params,
    lay_out,
    manual_axes,
    only,
    only_axes,
    param_specs,
)
from jpipe.pipeline.losses import Loss, LossTerms, add_terms, loss_terms, no_terms
from jpipe.pipeline.stages import Params, Stages, Tree, shapes_of
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
            places = jnp.arange(count + -count % microbatch_size).reshape(-1, microbatch_size)
            targets, own_loss = (targets, places < count), counted(loss)
        checks.check_batch(mesh, inputs=inputs, targets=targets)
        run = _Forward(stages, mesh, params, state, inputs, key)
        checks.check_loss(own_loss, run.outputs, targets, has_aux=has_aux)
        _, targets = lay_out(mesh, (), (), targets)

        def on_stage(
            variables: Variables, key: jax.Array | None, inputs: Tree, targets: Tree
        ) -> Any:
            def terms_of(outputs: Tree, i: jax.Array | int) -> LossTerms:
                return loss_terms(own_loss(outputs, stash.read(targets, i)))

            def add(terms: LossTerms, outputs: Tree, i: jax.Array) -> LossTerms:
                return add_terms(terms, terms_of(outputs, i))

            def nothing(outputs: Tree) -> LossTerms:
                return no_terms(jax.eval_shape(terms_of, outputs, 0))

            terms = run.on_stage(variables, key, inputs, add, nothing)
            total, weight, aux = jax.lax.psum(terms, tuple(run.manual))
            return (total / weight, aux) if has_aux else total / weight

        return run.shard_map(on_stage, PartitionSpec(), targets)

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
        run = _Forward(stages, mesh, params, state, inputs, key)
        checks.check_outputs(run.outputs)

        def on_stage(variables: Variables, key: jax.Array | None, inputs: Tree) -> Tree:
            def keep(buffers: Tree, outputs: Tree, i: jax.Array) -> Tree:
                return stash.write(buffers, i, outputs)

            def nothing(outputs: Tree) -> Tree:
                return stash.empty(num_microbatches, outputs)

            kept = run.on_stage(variables, key, inputs, keep, nothing)
            return jax.tree.map(lambda a: a[None], kept)

        by_stage = run.shard_map(
            on_stage, PartitionSpec(STAGE, *only(run.manual, batch_spec(mesh)))
        )
        if has_explicit_axes(mesh):  # which cannot index a dim that is sharded
            whole = NamedSharding(mesh, PartitionSpec(None, *batch_spec(mesh)))
            by_stage = jax.tree.map(lambda a: jax.reshard(a, whole), by_stage)
        outputs = jax.tree.map(lambda a: a[-1], by_stage)  # the last stage has them
        return outputs if microbatch_size is None else from_microbatches(outputs, count)

    return jax.jit(predict)


class _Forward:
    """What evaluation and prediction share: one pass of checked arguments through the pipeline."""

    def __init__(
        self,
        stages: Stages,
        mesh: Mesh,
        params: Params,
        state: Params | None,
        inputs: Tree,
        key: jax.Array | None,
    ) -> None:
        params = stages.tied(checks.as_params(params))
        state = checks.as_state(stages, params, state, key)
        checks.check_params(params, state, mesh)
        found = checks.check_stages(stages, params, state, inputs, key, mesh)
        self.outputs = found.outputs
        partition = stages.tied_partition
        self.manual = manual_axes(mesh, found.updates, key, partition)
        checks.check_divided(mesh, self.manual)
        variables = Variables(params, state, jax.tree.map(lambda _: None, state))
        self._parts, self._mesh, self._key = stages.parts, mesh, key
        of_state = (param_specs(mesh, kind) for kind in variables[1:])
        self._specs = Variables(param_specs(mesh, params, partition), *of_state)
        self._body_shapes = shapes_of(variables.part("body"))
        self._variables, self._inputs = lay_out(mesh, variables, self._specs, inputs)

    def on_stage(
        self,
        variables: Variables,
        key: jax.Array | None,
        inputs: Tree,
        consume: Callable[[Any, Tree, jax.Array], Any],
        nothing: Callable[[Tree], Any],
    ) -> Any:
        """Run on one device, see `run_forward`."""
        own = Variables(*map(gather_params, variables, self._specs))
        stages = self._mesh.shape[STAGE]
        return run_forward(
            self._parts, stages, own, self._body_shapes, key, inputs, consume, nothing
        )

    def shard_map(self, on_stage: Callable[..., Any], out: PartitionSpec, *batch: Tree) -> Any:
        """Call a function of variables, key, inputs and more of the batch on every device."""
        spec = only(self.manual, batch_spec(self._mesh))
        return jax.shard_map(
            on_stage,
            mesh=self._mesh,
            in_specs=(
                only_axes(self.manual, self._specs),
                PartitionSpec(),
                spec,
                *[spec] * len(batch),
            ),
            out_specs=out,
            axis_names=self.manual,
            check_vma=False,
        )(self._variables, self._key, self._inputs, *batch)
