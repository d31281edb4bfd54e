"""Loss scaling and compression in the pipeline's training step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parity import models

from jpipe.mesh import make_mesh
from jpipe.optim import (
    compressed_all_reduce,
    dynamic_loss_scale,
    loss_scale_state,
    onebit_adam,
)
from jpipe.pipeline import param_specs
from jpipe.train_step import (
    TrainState,
    abstract_train_state,
    init_train_state,
    make_reference_step,
    make_train_step,
)

METHODS = ["none", "bf16", "fp16", "int8", "onebit", "powersgd"]
UNEVEN = models.uneven((8, 8, 16, 4, 3), 5)
EVEN = models.mlp(4, 5, size=4)


def bits(tree):
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


@functools.cache
def history(problem_name, shape, make, steps=8):
    problem = {"even": EVEN, "uneven": UNEVEN}[problem_name]
    mesh = make_mesh(*shape)
    optimizer = make(mesh, param_specs(mesh, problem.params))
    state = init_train_state(lambda: problem.params, optimizer, mesh)
    step = make_train_step(problem.stages, problem.loss, optimizer, mesh)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, problem.inputs, problem.targets)
        losses.append(float(metrics.loss))
        assert not bool(metrics.skipped)
    assert step._cache_size() == 1, "the second step must not compile again"
    return losses, state


def plain(mesh, specs):
    return optax.adam(1e-2)


@functools.cache
def compressed(method):
    return lambda mesh, specs: optax.chain(
        compressed_all_reduce(method, mesh, specs), optax.adam(1e-2)
    )


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["even", "uneven"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(problem, method):
    """Stacked and heterogeneous parameters; the first step is made before anything is lost."""
    losses, state = history(problem, (4, 2), compressed(method))
    expected, _ = history(problem, (4, 2), plain)
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    close = {"none": 1e-5, "bf16": 5e-3, "fp16": 1e-3, "int8": 1e-2, "powersgd": 1e-2}
    if method in close:
        np.testing.assert_allclose(losses, expected, rtol=close[method])
    assert losses[-1] < 0.8 * losses[0]
    for leaf in jax.tree.leaves(state.params.body):
        assert leaf.ndim == 0 or leaf.sharding.shard_shape(leaf.shape) != leaf.shape


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (2, 3), (1, 8)], ids=str)
def test_onebit_adam_on_any_number_of_replicas(shape):
    problem = models.mlp(4, 5, size=24)
    mesh = make_mesh(*shape)
    optimizer = dynamic_loss_scale(
        onebit_adam(1e-2, mesh, param_specs(mesh, problem.params), freeze_step=4)
    )
    adam = optax.adam(1e-2)
    alone = TrainState(
        jnp.zeros((), jnp.int32),
        jax.tree.map(jnp.copy, problem.params),
        adam.init(problem.params),
    )
    state = init_train_state(lambda: problem.params, optimizer, mesh)
    step = make_train_step(problem.stages, problem.loss, optimizer, mesh)
    reference = make_reference_step(problem.stages, problem.loss, adam)
    losses = []
    for k in range(12):
        state, metrics = step(state, problem.inputs, problem.targets)
        losses.append(float(metrics.loss))
        if k < 5:  # the fifth loss is that after four updates
            alone, expected = reference(alone, problem.inputs, problem.targets)
            assert losses[-1] == pytest.approx(float(expected.loss), rel=1e-5)
    assert losses[-1] < losses[4]


def test_each_device_holds_its_own_errors_only():
    mesh = make_mesh(2, 4)
    optimizer = compressed("onebit")(mesh, param_specs(mesh, EVEN.params))
    state = abstract_train_state(lambda: EVEN.params, optimizer, mesh)
    (memory,) = [node.memory for node in state.opt_state if hasattr(node, "memory")]
    for leaf in jax.tree.leaves(memory):
        assert leaf.sharding.shard_shape(leaf.shape)[:3] == (1, 1, 1)
    made = init_train_state(lambda: EVEN.params, optimizer, mesh)
    for leaf in jax.tree.leaves(made.opt_state[0].memory):
        assert leaf.sharding.shard_shape(leaf.shape)[:3] == (1, 1, 1)


def with_marks(problem, part):
    """The same, but infinite in one part of the model for examples that are marked."""

    def hurt(marks, x):
        return x * jnp.where(marks > 0, jnp.inf, 1.0)[:, None]

    stages = problem.stages

    def stem(p, i):
        x = stages.stem(p, i["x"])
        return hurt(i["mark"], x) if part == "stem" else x

    def loss(y, t):
        return problem.loss(hurt(t["mark"], y) if part == "loss" else y, t["y"])

    return dataclasses.replace(stages, stem=stem), loss


@pytest.mark.parametrize("part", ["stem", "loss"])
@pytest.mark.parametrize("compression", [None, "onebit"])
def test_what_one_replica_hurts_all_skip(part, compression):
    """And nothing has changed but the scale and the count of steps."""
    mesh = make_mesh(2, 2)
    stages, loss = with_marks(EVEN, part)
    inner = (plain if compression is None else compressed(compression))(
        mesh, param_specs(mesh, EVEN.params)
    )
    optimizer = dynamic_loss_scale(inner)
    state = init_train_state(lambda: EVEN.params, optimizer, mesh)
    step = make_train_step(stages, loss, optimizer, mesh)
    no_marks = jnp.zeros(EVEN.inputs.shape[:2])
    clean, hurt = (
        ({"x": EVEN.inputs, "mark": marks}, {"y": EVEN.targets, "mark": marks})
        for marks in (no_marks, no_marks.at[3, 2].set(1.0))  # of the second replica
    )
    state, metrics = step(state, *clean)
    assert not bool(metrics.skipped)
    assert np.isfinite(float(metrics.grad_norm))
    before = bits((state.params, state.opt_state.inner))
    state, metrics = step(state, *hurt)
    assert bool(metrics.skipped)
    assert bits((state.params, state.opt_state.inner)) == before
    scaling = loss_scale_state(state.opt_state)
    for shard in scaling.scale.addressable_shards:
        assert float(shard.data) == 2.0**15
    assert int(state.step) == 2
    state, metrics = step(state, *clean)
    assert not bool(metrics.skipped)
    assert np.isfinite(float(metrics.loss))


def test_a_skipped_step_leaves_the_statistics_of_the_model():
    """Running averages that once hold infinity would never lose it."""
    problem, model_state, key = models.carrying(4, 5)
    mesh = make_mesh(2)
    optimizer = dynamic_loss_scale(optax.adam(1e-2))
    state = init_train_state(lambda: (problem.params, model_state), optimizer, mesh, key=key)
    step = make_train_step(problem.stages, problem.loss, optimizer, mesh)
    before = bits(state.model_state)
    state, metrics = step(state, problem.inputs.at[2, 1].set(jnp.inf), problem.targets)
    assert bool(metrics.skipped)
    assert bits(state.model_state) == before
    state, metrics = step(state, problem.inputs, problem.targets)
    assert not bool(metrics.skipped)
    assert bits(state.model_state) != before


def test_reported_loss_and_norm_are_unscaled():
    mesh = make_mesh(4)
    found = []
    for optimizer in (optax.adam(1e-2), dynamic_loss_scale(optax.adam(1e-2))):
        state = init_train_state(lambda: EVEN.params, optimizer, mesh)
        step = make_train_step(EVEN.stages, EVEN.loss, optimizer, mesh)
        _, metrics = step(state, EVEN.inputs, EVEN.targets)
        found.append(metrics)
    assert float(found[1].loss) == float(found[0].loss)
    assert float(found[1].grad_norm) == pytest.approx(float(found[0].grad_norm), rel=1e-6)
    assert float(found[0].loss_scale) == 1.0
    assert float(found[1].loss_scale) == 2.0**16


def test_float16_activations_need_the_scale():
    """Gradients below 2^-24 are zero in float16; scaled they come through."""
    base = models.mlp(4, 8, size=4)
    small = 1e-7
    half = jnp.float16
    problem = dataclasses.replace(
        base.stages,
        stem=lambda p, x: (x @ p["w"]).astype(half),
        body=lambda p, x: base.stages.body(jax.tree.map(lambda a: a.astype(half), p), x),
        head=lambda p, x: x.astype(jnp.float32) @ p["w"] + p["b"],
    )

    def loss(y, t):
        return small * base.loss(y, t)

    norms = {}
    for name, optimizer in {
        "float16": optax.sgd(1.0),
        "scaled": dynamic_loss_scale(optax.sgd(1.0)),
    }.items():
        mesh = make_mesh(4)
        state = init_train_state(lambda: base.params, optimizer, mesh)
        step = make_train_step(problem, loss, optimizer, mesh)
        state, metrics = step(state, base.inputs, base.targets)
        moved = jax.tree.map(lambda a, b: a - b, state.params.body, base.params.body)
        norms[name] = float(optax.tree.norm(moved)) / small
        assert not bool(metrics.skipped)
    reference = make_reference_step(base.stages, base.loss, optax.sgd(1.0))
    alone = TrainState(
        jnp.zeros((), jnp.int32),
        jax.tree.map(jnp.copy, base.params),
        optax.sgd(1.0).init(base.params),
    )
    alone, _ = reference(alone, base.inputs, base.targets)
    expected = float(
        optax.tree.norm(jax.tree.map(lambda a, b: a - b, alone.params.body, base.params.body))
    )
    assert norms["scaled"] == pytest.approx(expected, rel=0.1)
    assert norms["float16"] < 0.5 * expected
