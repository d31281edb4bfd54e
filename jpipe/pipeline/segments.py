"""A step in segments, between which everything can be saved."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jpipe.pipeline import checks
from jpipe.pipeline.losses import Loss
from jpipe.pipeline.stages import Stages
from jpipe.pipeline.step import Settings, Step
from jpipe.schedule.table import Schedule


@dataclasses.dataclass(frozen=True)
class Segments:
    """A step cut into segments of equal length; the functions are to be jitted.

    Attributes:
        start: `(params, inputs, targets, state, key, loss_scale) -> carry`, what all devices hold
            before the first tick. Arguments are those of `pipeline_value_and_grad`.
        advance: `(carry, first, params, ...) -> carry`, one segment further; `first` is an int32
            scalar, a multiple of `stride` below `num_periods`. The carry may be donated.
        finish: `(carry, params, ...)` returns what `pipeline_value_and_grad` does, after the last
            segment.
        stride: periods of the table in a segment.
        num_periods: periods of the table.
    """

    start: Callable[..., Any]
    advance: Callable[..., Any]
    finish: Callable[..., Any]
    stride: int
    num_periods: int

    @property
    def firsts(self) -> range:
        """The first period of each segment."""
        return range(0, self.num_periods, self.stride)


def pipeline_segments(
    stages: Stages,
    loss: Loss,
    mesh: Mesh,
    schedule: Schedule,
    *,
    microbatches: int,
    has_aux: bool = False,
    per_replica: bool = False,
    verify: bool = False,
) -> Segments:
    """Like `pipeline_value_and_grad`, but in segments of the same table, with the same bits.

    In the middle of a step stages have finished different numbers of microbatches, so what there
    is to save is all that the executor holds: sums of gradients, stash, what is on its way, state.

    Args:
        stages: the model.
        loss: as for `pipeline_value_and_grad`.
        mesh: as for `pipeline_value_and_grad`; every device must run a program of its own.
        schedule: the table.
        microbatches: about so many microbatches are finished in a segment.
        has_aux: as for `pipeline_value_and_grad`.
        per_replica: as for `pipeline_value_and_grad`.
        verify: as for `pipeline_value_and_grad`; between segments `carry.mismatch` holds what has
            been found so far.

    Raises:
        ValueError: as for `pipeline_value_and_grad`, or if `microbatches` is below 1.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches} must be at least 1")
    settings = Settings(stages, loss, mesh, schedule, has_aux, per_replica, verify)
    checks.check_schedule_fits(schedule, mesh, schedule.num_microbatches, schedule.num_chunks)
    period = schedule.period or 1
    # Warm-up and cool-down make for more ticks a microbatch than there are in between: round down.
    ticks = len(schedule.op) * microbatches // schedule.num_microbatches
    stride = max(1, ticks // period)
    num_periods = -(-len(schedule.op) // period)

    def start(*args: Any) -> Any:
        return Step(settings, *args).start()

    def advance(carry: Any, first: jax.Array, *args: Any) -> Any:
        return Step(settings, *args).advance(carry, jnp.asarray(first, jnp.int32), stride)

    def finish(carry: Any, *args: Any) -> Any:
        return Step(settings, *args).finish(carry)

    return Segments(start, advance, finish, stride, num_periods)
