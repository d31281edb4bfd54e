"""Losses that weigh their examples, and what else they report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import models
from parity.cases import WAYS, assert_same, place

from jpipe.mesh import make_mesh
from jpipe.pipeline import LossTerms, pipeline_evaluate, pipeline_value_and_grad
from jpipe.reference import reference_value_and_grad


def masked(num_stages, num_microbatches, size=4):
    """Every microbatch has another number of examples that count; one has none."""
    problem = models.mlp(num_stages, num_microbatches, size=size)
    mask = np.random.default_rng(0).random((num_microbatches, size)) < 0.6
    mask[1] = False
    mask[0, 0] = True

    def loss(outputs, targets):
        each = jnp.mean((outputs - targets["y"]) ** 2, -1)
        weight = targets["mask"].astype(jnp.float32)
        right = jnp.sum(jnp.where(targets["mask"], jnp.argmax(outputs, -1) == 0, False))
        return LossTerms(jnp.sum(each * weight), jnp.sum(weight), {"right": right, "each": each})

    return problem._replace(loss=loss, targets={"y": problem.targets, "mask": mask})


def whole_batch(problem):
    """The weighted mean over the whole batch at once, by plain JAX."""
    stages = problem.stages

    def loss(params):
        inputs, targets = jax.tree.map(
            lambda a: jnp.reshape(a, (-1, *a.shape[2:])), (problem.inputs, problem.targets)
        )
        x = stages.body(params.body, stages.stem(params.stem, inputs))
        terms = problem.loss(stages.head(params.head, x), targets)
        return terms.total / terms.weight, terms.aux["right"]

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(problem.params)


@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (2, 2)])
def test_unequal_masks_give_the_mean_over_all_that_counts(schedule, shape):
    problem = masked(4, 5)
    mesh = make_mesh(*shape)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, schedule, has_aux=True)
    (loss, aux), grads = run(*place(problem, mesh))
    (expected, right), expected_grads = whole_batch(problem)
    assert_same((loss, grads), (expected, expected_grads), 2e-6)
    assert int(aux["right"]) == int(right)
    reference = reference_value_and_grad(problem.stages, problem.loss, has_aux=True)
    (reference_loss, reference_aux), reference_grads = reference(
        problem.params, problem.inputs, problem.targets
    )
    assert_same((loss, grads), (reference_loss, reference_grads))
    if shape[1] == 1:  # over `data` each device sums its own examples of a microbatch
        np.testing.assert_allclose(aux["each"], reference_aux["each"], rtol=1e-6)


@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_evaluation_weighs_alike(shape):
    problem = masked(4, 5)
    mesh = make_mesh(*shape)
    evaluate = pipeline_evaluate(problem.stages, problem.loss, mesh, has_aux=True)
    loss, aux = evaluate(*place(problem, mesh))
    (expected, right), _ = whole_batch(problem)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert int(aux["right"]) == int(right)


def test_aux_is_not_dropped_in_silence():
    problem = masked(1, 2)
    run = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(1))
    with pytest.raises(ValueError, match="has_aux=True"):
        run(problem.params, problem.inputs, problem.targets)


def test_aux_is_summed_in_a_dtype_that_can_count():
    problem = models.mlp(1, 300, size=1)

    def loss(outputs, targets):
        aux = {"half": jnp.ones((), jnp.bfloat16), "flag": jnp.ones((), bool)}
        return LossTerms(jnp.mean((outputs - targets) ** 2), 1.0, aux)

    run = pipeline_value_and_grad(problem.stages, loss, make_mesh(1), has_aux=True)
    (_, aux), _ = run(problem.params, problem.inputs, problem.targets)
    assert float(aux["half"]) == 300
    assert int(aux["flag"]) == 300
