"""A model's arguments: checked, laid out on a mesh, and handed to every device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jpipe.mesh import DATA
from jpipe.pipeline import checks
from jpipe.pipeline.check_model import check_stages
from jpipe.pipeline.layout import (
    apart_axes,
    batch_spec,
    gather_params,
    lay_out,
    lies_over,
    manual_axes,
    only,
    only_axes,
    param_specs,
)
from jpipe.pipeline.stages import Params, Stages, Tree, shapes_of
from jpipe.pipeline.state import Variables, cut_state


class Placed:
    """What training, evaluation and prediction do with their arguments alike.

    Args:
        stages: the model.
        mesh: the mesh.
        params: the parameters, as stored.
        state: the state, or None.
        inputs: pytree of `[M, microbatch, ...]` arrays.
        key: a random key, or None.
        moves: whether the state is updated, or only read.
        per_replica: whether replicas along `data` run apart, whatever the model.

    Attributes:
        outputs: shapes and dtypes of the head's outputs for one microbatch.
        manual: the mesh axes over which devices run apart, see `layout.manual_axes`.
        variables: what the model holds, laid out.
        specs: how each of these lies on the mesh.
        body_shapes: shapes and dtypes of the body's variables, see `program.body_program`.

    Raises:
        ValueError: if the arguments do not fit each other or the mesh.
    """

    def __init__(
        self,
        stages: Stages,
        mesh: Mesh,
        params: Params,
        state: Params | None,
        inputs: Tree,
        key: jax.Array | None,
        *,
        moves: bool,
        per_replica: bool = False,
    ) -> None:
        params = stages.tied(checks.as_params(params))
        state = checks.as_state(stages, params, state, key)
        checks.check_params(params, state, mesh)
        found = check_stages(stages, params, state, inputs, key, mesh)
        self.outputs = found.outputs
        partition = stages.tied_partition
        if per_replica:
            checks.check_replicas(lies_over(DATA, partition))
            self.manual = apart_axes(mesh)
        else:
            self.manual = manual_axes(mesh, found.updates, key, partition)
        checks.check_divided(mesh, self.manual)
        updates = found.updates if moves else jax.tree.map(lambda _: None, state)
        moving, constant = cut_state(state, updates)
        self.specs = Variables(
            param_specs(mesh, params, partition),
            param_specs(mesh, constant),
            param_specs(mesh, moving),
        )
        variables = Variables(params, constant, moving)
        self.body_shapes = shapes_of(variables.part("body"))
        self.variables: Variables
        self.variables, self._inputs = lay_out(mesh, variables, self.specs, inputs)
        self._mesh, self._key = mesh, key

    def gather(self, variables: Variables, *, folded: bool = False) -> Variables:
        """One device's share of the variables, made ready for the stage it runs."""
        gather = functools.partial(gather_params, folded=folded)
        return Variables(*map(gather, variables, self.specs))

    @property
    def replica_specs(self) -> Params:
        """How `[replicas, ...]` gradients of the parameters lie on the mesh."""
        axis = DATA if DATA in self._mesh.axis_names else None
        return jax.tree.map(lambda spec: PartitionSpec(axis, *spec), self.specs.params)

    def run(
        self,
        on_stage: Callable[..., Any],
        out_specs: Any,
        *batch: Tree,
        scalars: Tree = (),
        per_device: Tree = (),
    ) -> Any:
        """Call a function on every device.

        Args:
            on_stage: takes variables, key, inputs, the rest of the batch, the scalars, and what is
                per device.
            out_specs: how what it returns lies on the mesh.
            *batch: pytrees of `[M, microbatch, ...]` arrays.
            scalars: what is the same on every device.
            per_device: what each device has of its own, a dim for each mesh axis before its dims.
        """
        batch_of_device = only(self.manual, batch_spec(self._mesh))
        _, *batch_laid_out = lay_out(self._mesh, (), (), *batch)
        return jax.shard_map(
            on_stage,
            mesh=self._mesh,
            in_specs=(
                only_axes(self.manual, self.specs),
                PartitionSpec(),
                *[batch_of_device] * (1 + len(batch)),
                *[PartitionSpec()] * len(scalars),
                *[PartitionSpec(*self._mesh.axis_names)] * len(per_device),
            ),
            out_specs=only_axes(self.manual, out_specs),
            axis_names=self.manual,
            check_vma=False,
        )(self.variables, self._key, self._inputs, *batch_laid_out, *scalars, *per_device)
