"""Evaluation and prediction equal the plain application of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import models
from parity.cases import TOLERANCE, reference_numbers

from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    batch_sharding,
    param_shardings,
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
)

MESHES = [(1, 1), (3, 1), (4, 1), (3, 2)]
MICROBATCHES = [1, 2, 7]  # one, fewer than stages, more


def lay_out(problem, mesh):
    params = jax.device_put(problem.params, param_shardings(mesh, problem.params))
    return params, *jax.device_put((problem.inputs, problem.targets), batch_sharding(mesh))


def plain_outputs(problem):
    """The outputs of each microbatch, one after the other, on one device."""
    stages, params = problem.stages, problem.params

    @jax.jit
    def apply(inputs):
        return stages.head(params.head, stages.body(params.body, stages.stem(params.stem, inputs)))

    num_microbatches = jax.tree.leaves(problem.inputs)[0].shape[0]
    return [
        apply(jax.tree.map(lambda a, i=i: a[i], problem.inputs)) for i in range(num_microbatches)
    ]


def plain_loss(problem, outputs=None):
    outputs = plain_outputs(problem) if outputs is None else outputs
    losses = [
        problem.loss(y, jax.tree.map(lambda a, i=i: a[i], problem.targets))
        for i, y in enumerate(outputs)
    ]
    return np.mean([float(loss) for loss in losses])


def assert_close(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    scale = max(np.abs(expected).max(), 1)
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=TOLERANCE["float32"])


def many_outputs(num_stages, num_microbatches):
    """A model whose head returns a pytree of several shapes and dtypes."""
    problem = models.two_streams(num_stages, num_microbatches)

    def head(p, x):
        scores = (x["wide"] @ p)[..., 0]
        return {
            "scores": scores,
            "label": (scores > 0, jnp.argmax(x["wide"], axis=-1)),
            "total": scores.sum(keepdims=True).astype(jnp.bfloat16),
        }

    return problem._replace(
        stages=models.Stages(problem.stages.stem, problem.stages.body, head),
        loss=lambda y, t: jnp.mean(jnp.abs(y["scores"] - t["y"])),
    )


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
@pytest.mark.parametrize("shape", MESHES)
def test_equals_plain_application_in_order(shape, num_microbatches):
    problem, mesh = models.mlp(shape[0], num_microbatches), make_mesh(*shape)
    params, inputs, targets = lay_out(problem, mesh)
    expected = plain_outputs(problem)
    outputs = pipeline_predict(problem.stages, mesh)(params, inputs)
    assert_close(outputs, np.stack(expected))
    loss = pipeline_evaluate(problem.stages, problem.loss, mesh)(params, inputs, targets)
    assert loss.dtype == jnp.float32
    assert loss.shape == ()
    assert float(loss) == pytest.approx(plain_loss(problem, expected), rel=1e-6)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_outputs_are_a_pytree(num_stages):
    problem, mesh = many_outputs(num_stages, 3), make_mesh(num_stages)
    params, inputs, targets = lay_out(problem, mesh)
    outputs = pipeline_predict(problem.stages, mesh)(params, inputs)
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *plain_outputs(problem))
    assert jax.tree.structure(outputs) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        if a.dtype == jnp.bfloat16:  # rounds what may differ in the last bit
            np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=2e-2)
        else:
            assert_close(a, b)
    loss = pipeline_evaluate(problem.stages, problem.loss, mesh)(params, inputs, targets)
    assert float(loss) == pytest.approx(plain_loss(problem), rel=1e-6)


def test_outputs_lie_over_the_data_axis():
    problem, mesh = models.mlp(4, 3), make_mesh(4, 2)
    params, inputs, _ = lay_out(problem, mesh)
    outputs = pipeline_predict(problem.stages, mesh)(params, inputs)
    assert outputs.sharding.is_equivalent_to(batch_sharding(mesh), outputs.ndim)


def test_several_blocks_a_stage_and_recompute():
    problem, mesh = models.mlp(8, 3, recompute="stage"), make_mesh(4)
    loss = pipeline_evaluate(problem.stages, problem.loss, mesh)(*lay_out(problem, mesh))
    assert float(loss) == pytest.approx(plain_loss(problem), rel=1e-6)


def test_equals_the_loss_of_training_and_of_the_reference():
    problem, mesh = models.mlp(4, 5), make_mesh(4)
    arguments = lay_out(problem, mesh)
    evaluated = pipeline_evaluate(problem.stages, problem.loss, mesh)(*arguments)
    trained, _ = pipeline_value_and_grad(problem.stages, problem.loss, mesh)(*arguments)
    expected, _ = reference_numbers(problem)
    assert float(evaluated) == pytest.approx(float(trained), rel=1e-6)
    assert float(evaluated) == pytest.approx(float(expected), rel=1e-6)


def test_bubbles_reach_no_output():
    # Of zeros, what the bubbles hold at first, stem, body and head all make NaN.
    problem = models.mlp(4, 3)

    def unit(x):
        return x / jnp.sqrt((x * x).sum(-1, keepdims=True))

    stages = models.Stages(
        stem=lambda p, x: unit(x) @ p["w"],
        body=models.repeat_block(lambda p, x: unit(x) @ p["w"] + p["b"]),
        head=lambda p, x: jnp.log(jnp.abs(unit(x) @ p["w"])),
    )
    problem, mesh = problem._replace(stages=stages), make_mesh(4)
    params, inputs, targets = lay_out(problem, mesh)
    outputs = pipeline_predict(stages, mesh)(params, inputs)
    assert_close(outputs, np.stack(plain_outputs(problem)))
    loss = pipeline_evaluate(stages, problem.loss, mesh)(params, inputs, targets)
    assert float(loss) == pytest.approx(plain_loss(problem), rel=1e-5)


def test_a_loss_that_is_not_a_number_is_reported():
    problem, mesh = models.mlp(4, 3), make_mesh(4)
    params, inputs, targets = lay_out(problem, mesh)
    evaluate = pipeline_evaluate(problem.stages, problem.loss, mesh)
    assert np.isnan(evaluate(params, inputs.at[1, 2, 0].set(jnp.nan), targets))
    outputs = pipeline_predict(problem.stages, mesh)(params, inputs.at[1, 2, 0].set(jnp.nan))
    nan = np.isnan(outputs).any(-1)
    assert nan[1, 2]
    assert nan.sum() == 1
