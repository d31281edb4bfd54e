"""Stages that differ in depth, in their parameters and in what they pass on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parity import models
from parity.cases import WAYS, assert_same, pipeline_numbers, place, reference_numbers

from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    Params,
    PerStage,
    Stages,
    param_shardings,
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
)
from jpipe.pipeline.keys import microbatch_keys
from jpipe.pipeline.stages import no_state
from jpipe.train_step import init_train_state, make_train_step

WIDTHS = [(6, 6), (8, 12, 6), (7, 5, 9, 16), (8, 8, 16, 4, 3)]


@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_equals_one_device(schedule, widths):
    problem = models.uneven(widths, 5)
    actual = pipeline_numbers(problem, schedule, len(widths) - 1)
    assert_same(actual, reference_numbers(problem))


@pytest.mark.parametrize("shape", [(2, 2), (4, 2)])
def test_data_axis(shape):
    problem = models.uneven(WIDTHS[1] if shape[0] == 2 else WIDTHS[3], 3)
    assert_same(pipeline_numbers(problem, "1f1b", *shape), reference_numbers(problem))


def test_mixed_dtypes():
    """Vectors of several dtypes travel, are kept and are summed; some stages lack one."""
    problem = models.uneven(WIDTHS[3], 4)
    body = [jax.tree.map(lambda a: a, own) for own in problem.params.body]
    body[2] = jax.tree.map(lambda a: a.astype(jnp.bfloat16), body[2])
    problem = problem._replace(params=problem.params._replace(body=PerStage(*body)))
    assert_same(pipeline_numbers(problem, "1f1b", 4), reference_numbers(problem), 2e-2)


def test_every_parameter_is_stored_in_equal_shares_under_its_own_name():
    problem = models.uneven(WIDTHS[3], 4)
    mesh = make_mesh(4)
    shardings = param_shardings(mesh, problem.params)
    for leaf, sharding in zip(
        jax.tree.leaves(problem.params), jax.tree.leaves(shardings), strict=True
    ):
        divides = any(size % 4 == 0 for size in leaf.shape)
        share = np.prod(sharding.shard_shape(leaf.shape)) / max(leaf.size, 1)
        assert share == (1 / 4 if divides else 1)


def test_evaluate_and_predict():
    problem = models.uneven(WIDTHS[2], 4)
    mesh = make_mesh(3)
    params, inputs, targets = place(problem, mesh)
    loss = pipeline_evaluate(problem.stages, problem.loss, mesh)(params, inputs, targets)
    expected, _ = reference_numbers(problem)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    outputs = pipeline_predict(problem.stages, mesh)(params, inputs)
    own, none = problem.params, no_state(problem.params)
    wanted, _ = problem.stages.parts.run(own, none, inputs, microbatch_keys(None, 0))
    np.testing.assert_allclose(outputs, wanted, rtol=2e-6, atol=2e-6)


def test_trains():
    problem = models.uneven(WIDTHS[3], 4)
    mesh = make_mesh(4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(3e-2))
    state = init_train_state(lambda: problem.params, optimizer, mesh)
    step = make_train_step(problem.stages, problem.loss, optimizer, mesh)
    losses = []
    for _ in range(30):
        state, metrics = step(state, problem.inputs, problem.targets)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.7 * losses[0]
    assert step._cache_size() == 1


def test_stages_that_do_not_fit_each_other_are_named():
    problem = models.uneven(WIDTHS[1], 4)
    wrong = models.uneven((8, 11, 6), 4)
    body = PerStage(problem.params.body[0], wrong.params.body[1])
    params = problem.params._replace(body=body)
    run = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(2))
    with pytest.raises(ValueError, match=r"stage 1 after stage 0 does not take .*12"):
        run(params, problem.inputs, problem.targets)


def test_another_number_of_stages_is_refused():
    problem = models.uneven(WIDTHS[1], 4)
    run = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(4))
    with pytest.raises(ValueError, match="for 2 stages, the mesh has 4"):
        run(problem.params, problem.inputs, problem.targets)


def test_functions_and_parameters_must_both_be_per_stage():
    problem = models.uneven(WIDTHS[1], 4)
    stages = Stages(problem.stages.stem, problem.stages.body[0], problem.stages.head)
    run = pipeline_value_and_grad(stages, problem.loss, make_mesh(2))
    with pytest.raises(ValueError, match="both be PerStage"):
        run(Params(*problem.params), problem.inputs, problem.targets)
