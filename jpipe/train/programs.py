"""The programs that a run needs, compiled before its first step."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jpipe.memory import Memory, memory_of
from jpipe.pipeline import batch_sharding, pipeline_evaluate
from jpipe.train.setup import Setup
from jpipe.train.stepper import Stepper
from jpipe.train_step import abstract_train_state, make_reference_step

Phase = Callable[[str], contextlib.AbstractContextManager[None]]


class Programs(NamedTuple):
    """The compiled programs of a run, and what a step needs of memory."""

    stepper: Stepper
    evaluate: Any
    memory: Memory
    memory_alone: Memory | None


def compile_programs(setup: Setup, phase: Phase) -> Programs:
    """Compile them.

    Args:
        setup: the run.
        phase: to be entered with what is being done, to show and time it.
    """
    task, stages = setup.task, setup.task.model.stages

    def batch(num_microbatches: int, sharding: Any) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct((num_microbatches, *a.shape), a.dtype, sharding=sharding)
            for a in (task.inputs, task.targets)
        ]

    sharding = batch_sharding(setup.mesh)
    with phase("tracing the step"):
        state = abstract_train_state(
            task.init, setup.optimizer, setup.mesh, partition=stages.partition
        )
        stepper = Stepper(setup, state, batch(setup.options.microbatches, sharding))
    with phase("compiling the step"):
        stepper.compile()
    with phase("compiling the evaluation"):
        evaluate = pipeline_evaluate(task.model.eval_stages, task.loss, setup.mesh, has_aux=True)
        of_validation = batch(task.validation[0].shape[0], sharding)
        compiled_evaluate = setup.compile(
            evaluate.lower(state.params, *of_validation, state.model_state)
        )
    return Programs(
        stepper=stepper,
        evaluate=compiled_evaluate,
        memory=memory_of(stepper.compiled),
        memory_alone=_memory_alone(setup, batch(setup.options.microbatches, None), phase),
    )


def _memory_alone(setup: Setup, batch: list[jax.ShapeDtypeStruct], phase: Phase) -> Memory | None:
    """Of the same step on one device; not asked for where stages differ: it takes too long."""
    task, optimizer = setup.task, setup.optimizer_alone
    if task.model.split_points is not None:
        return None
    with phase("compiling for one device, to compare memory"):
        alone = make_reference_step(task.model.stages, task.loss, optimizer)
        state = abstract_train_state(task.init, optimizer)
        return memory_of(setup.compile(alone.lower(state, *batch)))
