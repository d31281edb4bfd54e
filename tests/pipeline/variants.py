"""The MLP with something else in place of a part of it, held against one device."""

import dataclasses
import functools

import jax
import numpy as np
from parity import models
from parity.cases import assert_same, pipeline_numbers, reference_numbers

from jpipe.pipeline import (
    batch_sharding,
    param_shardings,
    pipeline_value_and_grad,
    repeat_block,
)

P, M, SIZE, D = 4, 5, 4, 8  # stages, microbatches, examples of a microbatch, width
base = functools.cache(lambda: models.mlp(P, M, size=SIZE, width=D))


def model(*, stem=None, body=None, block=None, head=None, parts=None, **fields):
    """The MLP with other functions, other parts of its parameters, another loss or batch."""
    body = repeat_block(block) if block else body
    functions = {"stem": stem, "body": body, "head": head}
    functions = {name: f for name, f in functions.items() if f is not None}
    problem = base()._replace(**fields)
    return problem._replace(
        stages=dataclasses.replace(problem.stages, **functions),
        params=problem.params._replace(**(parts or {})),
    )


def assert_parity(problem, schedule="1f1b", **options):
    expected = reference_numbers(problem)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(expected))  # or the test is void
    assert_same(pipeline_numbers(problem, schedule, P), expected, **options)


def on_mesh(problem, mesh, *, lay_out):
    arguments = problem.params, problem.inputs, problem.targets
    if lay_out:
        shardings = param_shardings(mesh, problem.params), batch_sharding(mesh)
        arguments = jax.device_put(arguments, (*shardings, shardings[1]))
    return pipeline_value_and_grad(problem.stages, problem.loss, mesh)(*arguments)
