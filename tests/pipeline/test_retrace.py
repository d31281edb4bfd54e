"""A pipeline is compiled again only when there is a reason, and says so when there is not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import models
from parity.cases import assert_same, reference_numbers
from pipeline.small import STAGES, changed, compilations, problem, train

from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    param_shardings,
    pipeline_value_and_grad,
)


def counted(found):
    """The problem with a stem that counts how often it is traced."""
    traces = []

    def stem(p, x):
        traces.append(x.shape)
        return found.stages.stem(p, x)

    return changed(found, stem=stem), traces


def test_another_batch_compiles_again_and_the_same_does_not():
    found, traces = counted(problem())
    run = pipeline_value_and_grad(found.stages, found.loss, make_mesh(STAGES))
    batches = {(m, size): models.mlp(STAGES, m, size=size) for m, size in ((3, 4), (7, 4), (3, 2))}
    for batch in batches.values():
        actual = run(found.params, batch.inputs, batch.targets)
        assert_same(actual, reference_numbers(batch))
    assert {shape[0] for shape in traces} == {2, 4}
    so_far = len(traces)
    with compilations() as durations:
        for batch in batches.values():
            run(found.params, batch.inputs + 1, batch.targets)
            run(found.params, batch.inputs, np.asarray(batch.targets))
    assert len(traces) == so_far
    assert len(durations) <= len(batches)  # the additions here


def test_other_values_do_not_compile_again():
    found, traces = counted(problem())
    mesh = make_mesh(STAGES)
    run = pipeline_value_and_grad(found.stages, found.loss, mesh)
    _, grads = run(found.params, found.inputs, found.targets)
    so_far = len(traces)
    shardings = param_shardings(mesh, found.params)
    for step in range(4):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, found.params, grads)
        params = jax.device_put(params, shardings)
        with compilations() as durations:
            _, grads = run(params, found.inputs, found.targets)
        # Once more at first, for parameters that lie on the stages by now.
        assert len(durations) <= (1 if step == 0 else 0)
    assert len(traces) <= 2 * so_far


def test_a_new_loss_in_every_step_warns():
    found, mesh = problem(), make_mesh(STAGES)

    def step():
        return train(found._replace(loss=lambda y, t: jnp.mean((y - t) ** 2)), mesh)

    step()
    step()
    with pytest.warns(RuntimeWarning, match=r"3 times.*loss.*define them once"):
        step()


def test_functions_and_shapes_that_differ_do_not_warn():
    found, mesh = problem(), make_mesh(STAGES)
    losses = [
        lambda y, t: jnp.mean((y - t) ** 2),
        lambda y, t: jnp.mean(jnp.abs(y - t)),
        lambda y, t: jnp.mean(jnp.cos(y - t)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in losses:
            train(found._replace(loss=loss), mesh)
        run = pipeline_value_and_grad(found.stages, found.loss, mesh)
        for m in (1, 2, 3):
            batch = problem(num_microbatches=m)
            for _ in range(3):
                run(batch.params, batch.inputs, batch.targets)
