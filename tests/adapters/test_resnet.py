"""A ResNet in a pipeline: stages that differ, batch norms, real images."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adapters.images import digits
from flax import nnx
from parity.cases import TOLERANCE, WAYS, assert_same, place
from parity.models import Problem

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import (
    ResNet,
    ResNetConfig,
    classification_loss,
)
from jpipe.pipeline import (
    param_shardings,
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
)
from jpipe.precision import Policy
from jpipe.reference import reference_value_and_grad
from jpipe.train_step import init_train_state, make_train_step

RESNET = ResNetConfig(depth=18, width=4)
DOUBLE = dataclasses.replace(
    RESNET, policy=Policy(compute="float64", output="float64", norm="float64")
)


def resnet(num_stages, config=RESNET, **settings):
    return pipeline_from_nnx(
        lambda rngs: ResNet(config, rngs=rngs),
        stem="stem",
        body="blocks",
        head="head",
        num_stages=num_stages,
        inputs=digits(1, 8)[0][0],
        **settings,
    )


def double(tree):
    """Batch norms amplify how sums were rounded: in float64 a true difference would still show."""
    return jax.tree.map(lambda a: a.astype(np.float64), tree)


def plain_resnet(num_microbatches, size):
    """Loss, gradients and statistics of a plain Flax loop over the microbatches."""
    graph, variables = nnx.split(ResNet(DOUBLE, rngs=nnx.Rngs(0)))
    model = nnx.merge(graph, double(variables))

    @nnx.jit
    def one(model, images, labels):
        def of(model):
            return classification_loss(model(images), labels).total / labels.size

        return nnx.value_and_grad(of)(model)

    batch = digits(num_microbatches, size, np.float64)
    results = [one(model, i, t) for i, t in zip(*batch, strict=True)]
    grads = [nnx.to_pure_dict(g) for _, g in results]
    mean = jax.tree.map(lambda *g: sum(g) / len(g), *grads)
    stats = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    return sum(value for value, _ in results) / len(results), mean, stats


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_data", "recompute"),
    [
        pytest.param("1f1b", 4, 1, "none", marks=pytest.mark.slow),
        ("1f1b", 2, 2, "stage"),
        pytest.param("1f1b-overlap", 3, 1, "block", marks=pytest.mark.slow),
    ],
)
# The stages are balanced with float32 statistics, which a float64 policy would update.
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
def test_resnet_on_real_images_has_the_numbers_of_plain_flax(
    schedule, num_stages, num_data, recompute
):
    mesh = make_mesh(num_stages, num_data)
    with jax.enable_x64(True):
        pipe = resnet(num_stages, DOUBLE, recompute=recompute)
        run = pipeline_value_and_grad(
            pipe.stages, classification_loss, mesh, schedule, has_aux=True
        )
        params, state = double(pipe.init(nnx.Rngs(0)))
        batch = digits(3, 16, np.float64)
        problem = Problem(pipe.stages, classification_loss, params, *batch)
        state = jax.device_put(state, param_shardings(mesh, state))
        (loss, aux), grads, state = run(*place(problem, mesh), state)
        expected, expected_grads, expected_stats = plain_resnet(3, 16)
        grads, stats = (jax.tree.map(jnp.asarray, pipe.to_plain(t)) for t in (grads, state))
        assert_same((loss, grads), (expected, expected_grads), TOLERANCE["float64"])
        assert_same((loss, stats), (expected, expected_stats), TOLERANCE["float64"])
    assert 0 <= int(aux["right"]) <= 48


@pytest.mark.parametrize(
    "schedule",
    [s if s == "zero-bubble" else pytest.param(s, marks=pytest.mark.slow) for s in WAYS],
)
def test_resnet_equals_one_device(schedule):
    pipe = resnet(4)
    params, state = pipe.init(nnx.Rngs(0))
    reference = reference_value_and_grad(pipe.stages, classification_loss, has_aux=True)
    expected = reference(params, *digits(3, 16), state)
    run = pipeline_value_and_grad(
        pipe.stages, classification_loss, make_mesh(4), schedule, has_aux=True
    )
    (loss, aux), grads, new = run(params, *digits(3, 16), state)
    assert_same((loss, grads), (expected[0][0], expected[1]), TOLERANCE["float32, batch norms"])
    assert_same((loss, new), (expected[0][0], expected[2]))
    assert int(aux["right"]) == int(expected[0][1]["right"])


@pytest.mark.slow
def test_resnet_learns_and_evaluates_with_running_averages():
    pipe, mesh, optimizer = resnet(4), make_mesh(4), optax.sgd(0.05, momentum=0.9)
    images, labels = digits(4, 16)
    state = init_train_state(lambda: pipe.init(nnx.Rngs(0)), optimizer, mesh)
    step = make_train_step(pipe.stages, classification_loss, optimizer, mesh)
    evaluate = pipeline_evaluate(pipe.eval_stages, classification_loss, mesh, has_aux=True)
    first, _ = evaluate(state.params, images, labels, state.model_state)
    for _ in range(30):
        state, _ = step(state, images, labels)
    last, aux = evaluate(state.params, images, labels, state.model_state)
    assert float(last) < float(first) / 4
    assert int(aux["right"]) > 56
    model = ResNet(RESNET, rngs=nnx.Rngs(1))
    full = nnx.state(model)
    nnx.replace_by_pure_dict(full, pipe.to_plain(state.params, state.model_state))
    nnx.update(model, full)
    model.eval()
    outputs = pipeline_predict(pipe.eval_stages, mesh)(state.params, images, state.model_state)
    np.testing.assert_allclose(outputs[1], model(images[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_resnet_152_compiles_and_steps():
    pipe, mesh = resnet(4, ResNetConfig(depth=152, width=8)), make_mesh(4)
    assert len(pipe.split_points) == 3
    assert max(pipe.stage_flops) < 1.1 * min(pipe.stage_flops)
    optimizer = optax.sgd(0.05, momentum=0.9)
    state = init_train_state(lambda: pipe.init(nnx.Rngs(0)), optimizer, mesh)
    step = make_train_step(pipe.stages, classification_loss, optimizer, mesh)
    losses = []
    for _ in range(4):
        state, metrics = step(state, *digits(4, 8))
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0] / 2


def test_training_statistics_in_evaluation_are_of_the_whole_microbatch():
    losses = []
    for mesh in (make_mesh(2), make_mesh(2, 2)):
        pipe = resnet(2)
        params, state = pipe.init(nnx.Rngs(0))
        evaluate = pipeline_evaluate(pipe.stages, classification_loss, mesh, has_aux=True)
        losses.append(float(evaluate(params, *digits(2, 16), state)[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
