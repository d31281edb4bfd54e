"""How a run takes a step: at once, or in segments with a snapshot between each two."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.pipeline import describe_mismatches
from jpipe.train.run_snapshots import RunSnapshots
from jpipe.train.setup import Setup
from jpipe.train_step import Metrics, TrainState, make_segmented_step, make_train_step

Batch = Any


class DamagedError(Exception):
    """What one stage sent another did not arrive as it was.

    Attributes:
        state: what the step began with.
        cursor: where in the data it began.
    """

    def __init__(self, told: str, state: TrainState, cursor: dict[str, int]) -> None:
        super().__init__(told)
        self.state, self.cursor = state, cursor


class Stepper:
    """Compiles a step, and takes it.

    Args:
        setup: the run.
        state: shapes and shardings of its state.
        batch: those of inputs and targets of a step.

    Attributes:
        compiled: the step, or what runs a segment of it: what needs most memory.
        carry: shapes and shardings of what is held within a step; None if it is taken at once.
    """

    def __init__(self, setup: Setup, state: TrainState, batch: list[jax.ShapeDtypeStruct]) -> None:
        self._setup, self._verify = setup, setup.options.verify_comm
        stages, task = setup.task.model.stages, setup.task
        every = setup.options.snapshot_every_microbatches
        self.carry: Any = None
        parts = (stages, task.loss, setup.optimizer, setup.mesh, setup.schedule)
        if every is None:
            self._lowered = {
                "step": make_train_step(*parts, verify=self._verify).lower(state, *batch)
            }
            return
        segments = make_segmented_step(*parts, every, verify=self._verify)
        own = NamedSharding(setup.mesh, PartitionSpec(*setup.mesh.axis_names))
        self.carry = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=own),
            jax.eval_shape(segments.start, state, *batch),
        )
        first = jax.ShapeDtypeStruct((), "int32")
        self._firsts, self._every = segments.firsts, every
        self._period = setup.schedule.period or 1
        self._lowered = {
            "start": segments.start.lower(state, *batch),
            "advance": segments.advance.lower(self.carry, first, state, *batch),
            "finish": segments.finish.lower(self.carry, state, *batch),
        }
        if self._verify:
            self._lowered["mismatches"] = segments.mismatches.lower(self.carry)

    def compile(self) -> None:
        """Compile what was lowered."""
        self._compiled = {
            name: self._setup.compile(lowered) for name, lowered in self._lowered.items()
        }
        self.compiled = self._compiled["step" if self.carry is None else "advance"]

    def take(
        self,
        state: TrainState,
        batch: Batch,
        cursor: dict[str, int],
        snapshots: RunSnapshots,
        within: tuple[Any, int] | None,
        ends: Callable[[], bool],
        note: Callable[[str], None],
    ) -> tuple[TrainState, Metrics | None]:
        """One step.

        Args:
            state: is donated.
            batch: inputs and targets.
            cursor: where in the data the batch begins.
            snapshots: takes those within the step.
            within: what is held in the middle of the step, and the segment to go on with; None to
                begin it.
            ends: whether the run is to end right here, after a snapshot within the step.
            note: is told how far the step has come, where that is known.

        Returns:
            The state and what to report; or, if the run is to end, the state that the step began
            with and None.

        Raises:
            DamagedError: if something was damaged on its way between stages.
        """
        if self.carry is None:
            new: tuple[TrainState, Metrics] = self._compiled["step"](state, *batch)
            self._check(new[1].mismatches, new[0], cursor)
            return new
        carry, k = within or (self._compiled["start"](state, *batch), 0)
        while k < len(self._firsts):
            first = jax.numpy.int32(self._firsts[k])
            carry = self._compiled["advance"](carry, first, state, *batch)
            k += 1
            jax.block_until_ready(carry)  # simulated devices stall with several in flight
            ticks = self._setup.schedule.num_ticks
            note(f"tick {min(ticks, k * self._firsts.step * self._period)} of {ticks}")
            if self._verify:
                self._check(self._compiled["mismatches"](carry), state, cursor)
            if k < len(self._firsts):
                snapshots.within_step(state, carry, k, k * self._every, cursor)
                if ends():
                    return state, None
        finished: tuple[TrainState, Metrics] = self._compiled["finish"](carry, state, *batch)
        return finished

    def _check(
        self, mismatches: jax.Array | None, state: TrainState, cursor: dict[str, int]
    ) -> None:
        if mismatches is None:
            return
        setup = self._setup
        told = list(describe_mismatches(mismatches, setup.schedule, setup.mesh))
        if told:
            more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
            raise DamagedError(f"{told[0]}, arrived damaged{more}", state, cursor)
