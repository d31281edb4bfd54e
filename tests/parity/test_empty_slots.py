"""What a slot holds before it is written changes nothing: accelerators do not clear it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import models
from parity.cases import assert_same, pipeline_numbers, reference_numbers
from parity.test_chunks import BOTH, assert_whole_agrees

from jpipe.mesh import make_mesh
from jpipe.pipeline import pipeline_predict, pipeline_value_and_grad, stash
from jpipe.schedule import SCHEDULES

GARBAGE = pytest.mark.usefixtures("garbage")


@pytest.fixture
def garbage(monkeypatch):
    def fill(buffer):
        value = jnp.nan if jnp.issubdtype(buffer.dtype, jnp.inexact) else 77
        return jnp.full(buffer.shape, value, buffer.dtype)

    empty = stash.empty
    monkeypatch.setattr(
        stash, "empty", lambda *args: jax.tree.map(fill, jax.eval_shape(lambda: empty(*args)))
    )


@GARBAGE
def test_slots_hold_garbage_here():
    assert np.isnan(stash.empty(2, jnp.zeros(3))).all()


@GARBAGE
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [2, 7])
def test_equals_one_device(schedule, num_microbatches):
    problem = models.mlp(4, num_microbatches)
    assert_same(pipeline_numbers(problem, schedule, 4), reference_numbers(problem))


@GARBAGE
@pytest.mark.parametrize("schedule", BOTH)
def test_chunks_equal_one_device(schedule):
    assert_whole_agrees(models.mlp(8, 5), 2, 4, schedule=schedule)


@GARBAGE
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_that_differ_equal_one_device(schedule):
    problem = models.uneven((8, 8, 16, 4, 3), 5)
    assert_same(pipeline_numbers(problem, schedule, 4), reference_numbers(problem))


@GARBAGE
def test_outputs_equal_those_of_one_device():
    problem = models.mlp(4, 5)
    outputs = [
        pipeline_predict(problem.stages, make_mesh(num_stages))(problem.params, problem.inputs)
        for num_stages in (1, 4)
    ]
    assert np.isfinite(outputs[1]).all()
    np.testing.assert_allclose(*outputs, rtol=1e-6)


@pytest.mark.parametrize(("num_data", "filled"), [(1, False), (2, True)])
def test_filled_only_where_xla_divides_them(num_data, filled):
    """It would give each device the whole of a buffer that nothing fills."""
    problem, state, key = models.carrying(2, 3)  # of which XLA divides microbatches over `data`
    mesh = make_mesh(2, num_data)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, "1f1b")
    arguments = problem.params, problem.inputs, problem.targets, state, key
    program = str(jax.make_jaxpr(run)(*arguments))
    assert (" empty[" in program) != filled
