"""One step's loss and gradients on all devices: as a whole, or tick by tick in segments."""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jpipe.mesh import DATA, STAGE
from jpipe.pipeline import checks
from jpipe.pipeline.check_model import check_loss
from jpipe.pipeline.executor import Carry, Executor
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


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """What is the same in all steps; see `pipeline_value_and_grad`.

    Raises:
        ValueError: if the mesh lacks `stage`, the schedule's name is unknown, or the table is
            wrong.
    """

    stages: Stages
    loss: Loss
    mesh: Mesh
    schedule: Schedule | str
    has_aux: bool
    per_replica: bool
    verify: bool

    def __post_init__(self) -> None:
        checks.check_mesh(self.mesh)
        if isinstance(self.schedule, str):
            make_schedule(self.schedule, self.mesh.shape[STAGE], 1)  # refuses an unknown name
        else:
            check_schedule(self.schedule)
            checks.check_trains(self.schedule)

    def table(self, num_microbatches: int, num_chunks: int) -> Schedule:
        """The schedule for a batch.

        Raises:
            ValueError: if it is for another number of stages, microbatches or chunks.
        """
        table = self.schedule
        if isinstance(table, str):
            table = make_schedule(table, self.mesh.shape[STAGE], num_microbatches, num_chunks)
        checks.check_schedule_fits(table, self.mesh, num_microbatches, num_chunks)
        return table


class Step:
    """One step, with its arguments checked and laid out; to be made while tracing.

    Args:
        settings: what is the same in all steps.
        params: the parameters, as stored.
        inputs: pytree of `[M, microbatch, ...]` arrays.
        targets: pytree of `[M, microbatch, ...]` arrays.
        state: the state, or None.
        key: a typed PRNG key, or None.
        loss_scale: float32 scalar, or None for 1.

    Raises:
        ValueError: if the arguments do not fit each other, the mesh or the schedule.
    """

    def __init__(
        self,
        settings: Settings,
        params: Params,
        inputs: Tree,
        targets: Tree,
        state: Params | None,
        key: jax.Array | None,
        loss_scale: jax.Array | None,
    ) -> None:
        mesh = settings.mesh
        self._settings, self._targets, self._loss_scale = settings, targets, loss_scale
        self._stored, self._had_state = checks.as_params(params), state is not None
        num_microbatches = checks.check_batch(mesh, inputs=inputs, targets=targets)
        self._table = settings.table(num_microbatches, len(chunks_of(self._stored.body)))
        self._placed = Placed(
            settings.stages,
            mesh,
            self._stored,
            state,
            inputs,
            key,
            moves=True,
            per_replica=settings.per_replica,
        )
        self._num_replicas = mesh.shape.get(DATA, 1)
        if settings.verify:
            checks.check_verifiable(mesh, self._placed.manual)
        check_loss(settings.loss, self._placed.outputs, targets, has_aux=settings.has_aux)
        leaves = jax.tree.leaves((self._placed.variables, inputs, targets))
        shapes = tuple((a.shape, str(a.dtype)) for a in leaves)
        warn_if_compiled_again(settings.stages, settings.loss, self._table.name, mesh, shapes)

    def whole(self) -> tuple[Any, ...]:
        """All ticks in one scan; see `pipeline_value_and_grad`."""

        def on_device(variables: Variables, *rest: Any) -> tuple[Any, ...]:
            return self._reduce(variables, self._executor(variables, *rest).run())

        return self._finished(on_device)

    def start(self) -> Carry:
        """What all devices hold before the first tick, each leaf with a dim for each mesh axis."""

        def on_device(*args: Any) -> Carry:
            return self._packed(self._executor(*args).start())

        carry: Carry = self._run(on_device, self._of_device)
        return carry

    def advance(self, carry: Carry, first: jax.Array, count: int) -> Carry:
        """Run `count` periods of the table from the period `first` on."""

        def on_device(*args: Any) -> Carry:
            *given, first, carry = args
            carry = self._executor(*given).advance(self._unpacked(carry), first, count)
            return self._packed(carry)

        new: Carry = self._run(on_device, self._of_device, first, carry=carry)
        return new

    def finish(self, carry: Carry) -> tuple[Any, ...]:
        """What `whole` returns, after the last tick."""

        def on_device(variables: Variables, *rest: Any) -> tuple[Any, ...]:
            return self._reduce(variables, self._unpacked(rest[-1]))

        return self._finished(on_device, carry=carry)

    def _executor(
        self,
        variables: Variables,
        key: jax.Array | None,
        inputs: Tree,
        targets: Tree,
        loss_scale: jax.Array | None,
    ) -> Executor:
        settings, placed = self._settings, self._placed
        if key is not None and settings.per_replica and self._num_replicas > 1:
            key = jax.random.fold_in(key, jax.lax.axis_index(DATA))
        return Executor(
            settings.stages.parts,
            settings.loss,
            self._table,
            STAGE,
            placed.gather(variables, folded=self._table.folded),
            placed.body_shapes,
            key,
            loss_scale,
            settings.verify,
            inputs,
            targets,
        )

    def _reduce(self, variables: Variables, carry: Carry) -> tuple[Any, ...]:
        """What the devices have found, put together; what was verified, for each."""
        terms, grads, moving = carry.terms, carry.grads, carry.moving
        placed, specs = self._placed, self._placed.specs
        # Of the terms only the last stage has any.
        total, weight, aux = jax.lax.psum(terms, tuple(placed.manual))
        # So far the gradients are of the total divided by M.
        scale = self._table.num_microbatches / weight
        table = self._table
        grads = share_grads(grads, variables.params, specs.params, folded=table.folded)
        if self._settings.per_replica:
            # The mean over replicas is to be what otherwise is their sum.
            grads = jax.tree.map(lambda g: g[None] * (scale * self._num_replicas), grads)
            moving = mean_state(moving, DATA) if self._num_replicas > 1 else moving
        else:
            grads = jax.lax.psum(grads, DATA) if DATA in placed.manual else grads
            grads = jax.tree.map(lambda g: g * scale, grads)
        last = table.stage_of(table.last)
        moving = share_state(moving, variables.moving, specs.moving, last, folded=table.folded)
        value = (total / weight, aux) if self._settings.has_aux else total / weight
        return value, grads, moving, self._packed(carry.mismatch)

    def _finished(self, on_device: Any, carry: Carry | None = None) -> tuple[Any, ...]:
        """Run what reduces, and bring the gradients into the form of the parameters."""
        settings, placed = self._settings, self._placed
        of_grads = placed.replica_specs if settings.per_replica else placed.specs.params
        value, grads, moving, mismatches = self._run(
            on_device,
            (PartitionSpec(), of_grads, placed.specs.moving, self._of_device),
            carry=carry,
        )
        if settings.stages.partition is not None:
            (grads,) = lay_out(settings.mesh, grads, of_grads)
        tied_back = functools.partial(settings.stages.tied_back, stored=self._stored)
        grads = jax.vmap(tied_back)(grads) if settings.per_replica else tied_back(grads)
        results = [value, grads]
        if self._had_state:
            results.append(State(moving, placed.variables.constant).whole())
        if settings.verify:
            results += lay_out(settings.mesh, mismatches, PartitionSpec())
        return tuple(results)

    def _run(
        self, on_device: Any, out_specs: Any, *scalars: Any, carry: Carry | None = None
    ) -> Any:
        return self._placed.run(
            on_device,
            out_specs,
            self._targets,
            scalars=(self._loss_scale, *scalars),
            per_device=() if carry is None else (carry,),
        )

    @property
    def _of_device(self) -> PartitionSpec:
        return PartitionSpec(*self._settings.mesh.axis_names)

    def _packed(self, own: Tree) -> Any:
        ones = (1,) * len(self._settings.mesh.axis_names)
        return jax.tree.map(lambda a: a.reshape(*ones, *a.shape), own)

    def _unpacked(self, carry: Carry) -> Carry:
        dims = len(self._settings.mesh.axis_names)
        unpacked: Carry = jax.tree.map(lambda a: a.reshape(a.shape[dims:]), carry)
        return unpacked
