"""A small pipeline of NumPy arrays, and what is done with it."""

import contextlib
import dataclasses

import jax
import numpy as np
from parity import models

from jpipe.pipeline import (
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
)

STAGES, MICROBATCHES, SIZE = 4, 3, 4


def problem(num_blocks=STAGES, num_microbatches=MICROBATCHES):
    """Of NumPy arrays, so that nothing compiles to make or move them."""
    return jax.tree.map(
        lambda a: np.asarray(a) if isinstance(a, jax.Array) else a,
        models.mlp(num_blocks, num_microbatches, size=SIZE),
    )


def changed(found, *, stem=None, body=None, head=None, **fields):
    """The problem with other functions in its stages, or other fields."""
    stages = {"stem": stem, "body": body, "head": head}
    stages = {name: f for name, f in stages.items() if f is not None}
    return found._replace(stages=dataclasses.replace(found.stages, **stages), **fields)


def with_params(found, **parts):
    return found._replace(params=found.params._replace(**parts))


def train(found, mesh, schedule="1f1b"):
    run = pipeline_value_and_grad(found.stages, found.loss, mesh, schedule)
    return run(found.params, found.inputs, found.targets)


def evaluate(found, mesh):
    run = pipeline_evaluate(found.stages, found.loss, mesh)
    return run(found.params, found.inputs, found.targets)


def predict(found, mesh):
    return pipeline_predict(found.stages, mesh)(found.params, found.inputs)


@contextlib.contextmanager
def compilations():
    """Collects the durations of everything that XLA compiles inside."""
    durations = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            durations.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield durations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
