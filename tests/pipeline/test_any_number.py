"""Evaluation and prediction of any number of examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import models
from parity.cases import place

from jpipe.mesh import make_mesh
from jpipe.pipeline import LossTerms, param_shardings, pipeline_evaluate, pipeline_predict


def examples(count):
    """A model with its parameters, and so many examples."""
    problem = models.mlp(4, 1, size=count)
    return problem._replace(inputs=problem.inputs[0], targets=problem.targets[0])


def by_hand(problem):
    stages, params = problem.stages, problem.params
    return stages.head(
        params.head, stages.body(params.body, stages.stem(params.stem, problem.inputs))
    )


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 17])
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
def test_any_number_of_examples(count, mesh):
    problem, mesh = examples(count), make_mesh(*mesh)
    params = jax.device_put(problem.params, param_shardings(mesh, problem.params))
    outputs = pipeline_predict(problem.stages, mesh, microbatch_size=8)(params, problem.inputs)
    expected = by_hand(problem)
    assert outputs.shape == expected.shape
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    evaluate = pipeline_evaluate(problem.stages, problem.loss, mesh, microbatch_size=8)
    loss = evaluate(params, problem.inputs, problem.targets)
    assert float(loss) == pytest.approx(float(problem.loss(expected, problem.targets)), rel=1e-6)


def test_weights_and_reports_count_real_examples_only():
    problem = examples(11)
    mask = np.arange(11) % 3 > 0

    def loss(outputs, targets):
        each = jnp.sum((outputs - targets["y"]) ** 2, -1)
        weight = targets["mask"].astype(jnp.float32)
        return LossTerms(jnp.sum(each * weight), jnp.sum(weight), {"seen": jnp.sum(weight > -1)})

    targets = {"y": problem.targets, "mask": mask}
    evaluate = pipeline_evaluate(
        problem.stages, loss, make_mesh(4), has_aux=True, microbatch_size=4
    )
    value, aux = evaluate(problem.params, problem.inputs, targets)
    terms = loss(by_hand(problem), targets)
    assert float(value) == pytest.approx(float(terms.total / terms.weight), rel=1e-6)
    assert int(aux["seen"]) == 11


def test_what_fills_a_microbatch_never_counts():
    """Even if the repeated example makes an infinity."""
    problem = examples(3)

    def loss(outputs, targets):
        return jnp.mean(targets["x"]) + 0 * jnp.mean(outputs)

    evaluate = pipeline_evaluate(problem.stages, loss, make_mesh(2), microbatch_size=2)
    value = evaluate(problem.params, problem.inputs, {"x": np.float32([1, 2, 6])})
    assert float(value) == pytest.approx(3)


def test_between_training_steps_as_before():
    problem = models.mlp(4, 3)
    params, inputs, targets = place(problem, make_mesh(4))
    loss = pipeline_evaluate(problem.stages, problem.loss, make_mesh(4))(params, inputs, targets)
    flat = (a.reshape(-1, a.shape[-1]) for a in (inputs, targets))
    evaluate = pipeline_evaluate(problem.stages, problem.loss, make_mesh(4), microbatch_size=5)
    assert float(evaluate(params, *flat)) == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize(
    ("size", "inputs", "targets", "words"),
    [
        (0, np.zeros((3, 5)), np.zeros((3, 3)), "microbatch_size=0 must be at least 1"),
        (2, np.zeros((3, 5)), np.zeros((4, 3)), r"targets has shape \(4, 3\) but inputs"),
        (2, np.zeros((0, 5)), np.zeros((0, 3)), "first dim must hold the examples"),
        (2, {}, {}, "hold no arrays"),
        (3, np.zeros((6, 5)), np.zeros((6, 3)), "3 examples a microbatch.*multiple of 2"),
    ],
)
def test_bad_examples_are_refused(size, inputs, targets, words):
    problem = examples(3)
    evaluate = pipeline_evaluate(
        problem.stages, problem.loss, make_mesh(2, 2), microbatch_size=size
    )
    with pytest.raises(ValueError, match=words):
        evaluate(problem.params, inputs, targets)
