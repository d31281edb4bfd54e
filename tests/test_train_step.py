import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parity import models
from parity.cases import WAYS

from jpipe.mesh import make_mesh
from jpipe.train_step import (
    TrainState,
    abstract_train_state,
    init_train_state,
    make_reference_step,
    make_train_step,
)

PROBLEM = models.mlp(4, 6, size=4)


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


def run(mesh, schedule="1f1b", steps=5):
    state = init_train_state(lambda: PROBLEM.params, optimizer(), mesh)
    step = make_train_step(PROBLEM.stages, PROBLEM.loss, optimizer(), mesh, schedule)
    history = []
    for _ in range(steps):
        state, metrics = step(state, PROBLEM.inputs, PROBLEM.targets)
        history.append((float(metrics.loss), float(metrics.grad_norm)))
    assert step._cache_size() == 1, "the second step must not compile again"
    return state, history


def run_reference(steps=5):
    params = jax.tree.map(jnp.copy, PROBLEM.params)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer().init(params))
    step = make_reference_step(PROBLEM.stages, PROBLEM.loss, optimizer())
    history = []
    for _ in range(steps):
        state, metrics = step(state, PROBLEM.inputs, PROBLEM.targets)
        history.append((float(metrics.loss), float(metrics.grad_norm)))
    return state, history


@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (2, 2), (4, 2)])
def test_trains_as_one_device_does(shape, schedule):
    """Clipping is at work here: the norm must be that of all stages, each counted once."""
    state, history = run(make_mesh(*shape), schedule)
    expected, expected_history = run_reference()
    assert expected_history[0][1] > 0.5, "this test wants clipping"
    np.testing.assert_allclose(history, expected_history, rtol=2e-6)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    assert int(state.step) == 5


def test_blocks_and_their_optimizer_state_lie_on_their_stages():
    state, _ = run(make_mesh(4), steps=1)
    for tree in (state.params.body, state.opt_state[1][0].mu.body, state.opt_state[1][0].nu.body):
        for leaf in jax.tree.leaves(tree):
            assert leaf.sharding.shard_shape(leaf.shape)[0] == leaf.shape[0] // 4


def test_the_state_is_donated():
    mesh = make_mesh(4)
    state = init_train_state(lambda: PROBLEM.params, optimizer(), mesh)
    step = make_train_step(PROBLEM.stages, PROBLEM.loss, optimizer(), mesh)
    step(state, PROBLEM.inputs, PROBLEM.targets)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_compiles_without_a_state():
    mesh = make_mesh(2)
    state = abstract_train_state(lambda: PROBLEM.params, optimizer(), mesh)
    step = make_train_step(PROBLEM.stages, PROBLEM.loss, optimizer(), mesh)
    compiled = step.lower(state, PROBLEM.inputs, PROBLEM.targets).compile()
    real = init_train_state(lambda: PROBLEM.params, optimizer(), mesh)
    _, metrics = compiled(real, PROBLEM.inputs, PROBLEM.targets)
    assert float(metrics.loss) == pytest.approx(run_reference(1)[1][0][0], rel=1e-6)


OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "masked": lambda: optax.masked(
        optax.adam(1e-2), lambda p: jax.tree.map(lambda a: a.ndim > 2, p)
    ),
    "partition": lambda: optax.partition(
        {"slow": optax.sgd(1e-3, momentum=0.9), "frozen": optax.set_to_zero()},
        lambda p: jax.tree.map(lambda a: "slow" if a.ndim > 2 else "frozen", p),
    ),
    "multi-step": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "lion": lambda: optax.lion(1e-3),
    "sm3": lambda: optax.sm3(1e-2),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optax_optimizer_trains_as_on_one_device(name):
    make, mesh = OPTIMIZERS[name], make_mesh(4)
    state = init_train_state(lambda: PROBLEM.params, make(), mesh)
    step = make_train_step(PROBLEM.stages, PROBLEM.loss, make(), mesh)
    alone = TrainState(
        jnp.zeros((), jnp.int32),
        jax.tree.map(jnp.copy, PROBLEM.params),
        make().init(PROBLEM.params),
    )
    alone_step = make_reference_step(PROBLEM.stages, PROBLEM.loss, make())
    for _ in range(3):
        state, metrics = step(state, PROBLEM.inputs, PROBLEM.targets)
        alone, expected = alone_step(alone, PROBLEM.inputs, PROBLEM.targets)
        assert float(metrics.loss) == pytest.approx(float(expected.loss), rel=2e-6)
    assert step._cache_size() == 1
    for leaf in jax.tree.leaves(state.params.body):
        assert leaf.sharding.shard_shape(leaf.shape)[0] == leaf.shape[0] // 4


def test_bfloat16_parameters_keep_their_dtype_and_compile_once():
    problem = models.mlp(4, 6, dtype=jnp.bfloat16)
    mesh = make_mesh(4)
    state = init_train_state(lambda: problem.params, optimizer(), mesh)
    step = make_train_step(problem.stages, problem.loss, optimizer(), mesh)
    compiled = step.lower(state, problem.inputs, problem.targets).compile()
    for _ in range(3):
        state, _ = compiled(state, problem.inputs, problem.targets)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state.params))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.opt_state[1][0].mu))


def test_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("stage", "data"))
    _, history = run(mesh, steps=2)
    np.testing.assert_allclose(history, run_reference(2)[1], rtol=2e-6)
