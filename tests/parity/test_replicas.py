"""Gradients of each replica, which run apart: those of one device that has its examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from parity import models
from parity.cases import WAYS, assert_same, place, reference_numbers

from jpipe.mesh import make_mesh
from jpipe.pipeline import Params, Stages, param_shardings, pipeline_value_and_grad
from jpipe.pipeline.layout import fsdp
from jpipe.reference import reference_value_and_grad

WIDTHS = (8, 8, 16, 4, 3)
MESHES = [(2, 2), (4, 2), (2, 4), (1, 3)]


def per_replica(problem, schedule, mesh, *rest):
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, schedule, per_replica=True)
    return run(*place(problem, mesh), *rest)


def share(batch, replica, count):
    """A replica's part of each microbatch."""
    return jax.tree.map(lambda a: jnp.split(a, count, axis=1)[replica], batch)


def assert_each_is_one_device_with_its_examples(actual, problem, count):
    loss, grads = actual
    run = reference_value_and_grad(problem.stages, problem.loss)
    losses = []
    for replica in range(count):
        inputs, targets = share((problem.inputs, problem.targets), replica, count)
        expected = run(problem.params, inputs, targets)
        losses.append(float(expected[0]))
        assert_same((expected[0], jax.tree.map(lambda g, r=replica: g[r], grads)), expected)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_equal_stages(schedule, shape):
    problem, mesh = models.mlp(4, 5, size=12), make_mesh(*shape)
    loss, grads = per_replica(problem, schedule, mesh)
    assert_each_is_one_device_with_its_examples((loss, grads), problem, shape[1])
    mean = jax.tree.map(lambda g: g.mean(0), grads)
    assert_same((loss, mean), reference_numbers(problem), 2e-6)


@pytest.mark.parametrize("schedule", WAYS)
def test_stages_that_differ(schedule):
    problem = models.uneven(WIDTHS, 5)
    actual = per_replica(problem, schedule, make_mesh(4, 2))
    assert_each_is_one_device_with_its_examples(actual, problem, 2)


def test_gradients_lie_on_their_replica_and_stage():
    problem, mesh = models.mlp(4, 5, size=4), make_mesh(2, 2)
    _, grads = per_replica(problem, "1f1b", mesh)
    for leaf in jax.tree.leaves(grads.body):
        assert leaf.sharding.shard_shape(leaf.shape)[:2] == (1, leaf.shape[1] // 2)


def test_replicas_exchange_nothing_but_the_loss():
    problem, mesh = models.mlp(4, 5, size=4), make_mesh(1, 4)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, per_replica=True)
    text = run.lower(*place(problem, mesh)).compile().as_text()
    reduced = [line for line in text.splitlines() if " all-reduce(" in line]
    assert reduced, "the loss is summed"
    assert all("f32[]" in line for line in reduced)


@pytest.mark.parametrize("schedule", WAYS)
def test_state_and_randomness_are_those_of_each_replica(schedule):
    """Batch norms of a replica's own examples, a key for each; state ends as the mean."""
    problem, state, key = models.carrying(4, 5, size=8)
    mesh = make_mesh(2, 2)
    placed = jax.device_put(state, param_shardings(mesh, state))
    loss, grads, new = per_replica(problem, schedule, mesh, placed, key)
    run = reference_value_and_grad(problem.stages, problem.loss)
    states = []
    for replica in range(2):
        inputs, targets = share((problem.inputs, problem.targets), replica, 2)
        own_key = jax.random.fold_in(key, replica)
        expected = run(problem.params, inputs, targets, state, own_key)
        own = jax.tree.map(lambda g, r=replica: g[r], grads)
        assert_same((loss, own), (loss, expected[1]))
        states.append(expected[2])
    mean = jax.tree.map(lambda a, b: (a + b) / 2 if a.dtype == jnp.float32 else a, *states)
    assert_same((loss, new), (loss, mean))


def test_one_replica_has_the_numbers_of_one_device():
    """With its batch statistics and random numbers, whatever asks for them apart."""
    problem, state, key = models.carrying(4, 3)
    loss, grads, new = per_replica(problem, "1f1b", make_mesh(2), state, key)
    run = reference_value_and_grad(problem.stages, problem.loss)
    expected = run(problem.params, problem.inputs, problem.targets, state, key)
    assert_same((loss, jax.tree.map(lambda g: g[0], grads)), expected[:2])
    assert_same((loss, new), (expected[0], expected[2]))


def test_tied_parameters():
    base = models.mlp(4, 3, size=4)

    def tie(params):
        return params._replace(head={"w": params.stem["w"][:3].T, **params.head})

    stages = Stages(base.stages.stem, base.stages.body, lambda p, x: x @ p["w"] + p["b"], tie=tie)
    params = Params(base.params.stem, base.params.body, {"b": base.params.head["b"]})
    problem = base._replace(stages=stages, params=params)
    actual = per_replica(problem, "1f1b", make_mesh(2, 2))
    assert_each_is_one_device_with_its_examples(actual, problem, 2)


def test_parameters_over_data_are_refused():
    problem, mesh = models.mlp(4, 3), make_mesh(2, 2)
    stages = Stages(
        problem.stages.stem,
        problem.stages.body,
        problem.stages.head,
        partition=fsdp(mesh, problem.params),
    )
    with pytest.raises(ValueError, match="FSDP"):
        per_replica(problem._replace(stages=stages), "1f1b", mesh)


@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize("scale", [2.0**13, 1e-3])
def test_a_loss_scale_multiplies_gradients_and_not_the_loss(schedule, scale):
    problem, mesh = models.mlp(4, 5), make_mesh(4)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, schedule)
    loss, grads = run(*place(problem, mesh), loss_scale=jnp.float32(scale))
    unscaled = jax.tree.map(lambda g: g / scale, grads)
    assert_same((loss, unscaled), reference_numbers(problem))
    reference = reference_value_and_grad(problem.stages, problem.loss)
    expected = reference(*problem[2:], loss_scale=jnp.float32(scale))
    assert_same((loss, grads), expected)


def test_a_loss_scale_keeps_float64():
    with jax.enable_x64(True):
        base = models.mlp(4, 3, dtype=jnp.float64)
        mesh = make_mesh(2)
        run = pipeline_value_and_grad(base.stages, base.loss, mesh)
        loss, grads = run(*place(base, mesh), loss_scale=jnp.float32(8))
        expected = reference_numbers(base)
        assert_same((loss, jax.tree.map(lambda g: g / 8, grads)), expected, 1e-11)


def test_summing_before_dividing_would_overflow():
    """float16 parameters, S = 2^13, M = 8, gradient 1.5: exactly 1.5 comes out."""
    stages = Stages(lambda p, x: x * p, lambda p, x: x + 0 * p.sum(), lambda p, x: x)
    half = jnp.float16
    params = Params(jnp.ones((), half), jnp.zeros((2, 1), half), {})
    inputs = jnp.full((8, 4), 1.5, half)
    for mesh in (make_mesh(2), make_mesh(2, 2)):
        run = pipeline_value_and_grad(stages, lambda y, t: jnp.mean(y), mesh)
        _, grads = run(params, inputs, inputs, loss_scale=jnp.float32(2**13))
        assert grads.stem.dtype == jnp.float32
        assert float(grads.stem) / 2**13 == 1.5


@pytest.mark.parametrize("axis", [None, "data"])
def test_specs_of_what_comes_out(axis):
    """The first dim lies over `data`, and is there without such an axis, too."""
    problem = models.mlp(4, 3)
    mesh = make_mesh(2, 2) if axis else jax.make_mesh((2,), ("stage",))
    _, grads = per_replica(problem, "1f1b", mesh)
    leaf = grads.body["w"]
    assert leaf.shape == (2 if axis else 1, 4, 8, 8)
    assert leaf.sharding.spec[:2] == PartitionSpec(axis, "stage")[:2]
