"""1-bit Adam: Adam at first, and then the algorithm of the paper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec
from optim.replicas import PARAMS, SIZES, NumPyOneBit, draw, over, replicas, waiting

from jpipe.optim import onebit_adam, scale_by_onebit_adam

VECTOR = {"w": jnp.linspace(-1, 1, 300)}


def bits(tree):
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


def gradients(count, steps, size=300, seed=0):
    return np.random.default_rng(seed).normal(0.2, 1, (steps, count, size)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("count", SIZES)
def test_before_the_freeze_it_is_adam_to_the_bit(count):
    """Operation by operation: as one program, XLA would round either as it sees fit."""
    mesh = replicas(count)
    optimizer, adam = onebit_adam(1e-2, mesh, freeze_step=5), optax.adam(1e-2)
    state, plain = optimizer.init(PARAMS), adam.init(PARAMS)
    rng = np.random.default_rng(0)
    for _ in range(5):
        # Whole numbers, so that a mean does not depend on the order of its summands.
        own = jax.tree.map(lambda a: jnp.round(a * 1e5), draw(rng, count))
        mean = jax.tree.map(lambda a: a.sum(0) / count, own)
        with jax.disable_jit():
            updates, state = optimizer.update(over(mesh, own), state)
            expected, plain = adam.update(mean, plain)
        assert bits(updates) == bits(expected)


def test_before_the_freeze_it_is_adam_as_one_program():
    mesh = replicas(3)
    optimizer, adam = onebit_adam(1e-2, mesh, freeze_step=5), optax.adam(1e-2)
    state, plain = optimizer.init(PARAMS), adam.init(PARAMS)
    rng = np.random.default_rng(0)
    for _ in range(5):
        own = draw(rng, 3)
        updates, state = waiting(optimizer.update)(over(mesh, own), state)
        expected, plain = waiting(adam.update)(jax.tree.map(lambda a: a.mean(0), own), plain)
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)


class NumPyAdam:
    """Algorithm 1 of the paper, with the bias corrections of Adam."""

    def __init__(self, size, count, block, freeze_step, b1=0.9, b2=0.999, eps=1e-8):
        self.compression = NumPyOneBit(size, count, block)
        self.freeze_step, self.b1, self.b2, self.eps = freeze_step, b1, b2, eps
        self.m, self.v, self.t = np.zeros(size), np.zeros(size), 0

    def update(self, grads):
        frozen = self.t >= self.freeze_step
        self.t += 1
        if frozen:
            self.m = self.compression.mean(self.b1 * self.m + (1 - self.b1) * grads)
        else:
            mean = grads.mean(0)
            self.m = self.b1 * self.m + (1 - self.b1) * mean
            self.v = self.b2 * self.v + (1 - self.b2) * mean**2
        v = self.v / (1 - self.b2 ** min(self.t, self.freeze_step))
        return self.m / (1 - self.b1**self.t) / (np.sqrt(v) + self.eps)


@pytest.mark.parametrize("count", SIZES[1:])
def test_after_the_freeze_it_is_the_paper(count):
    model, mesh = NumPyAdam(300, count, 64, 4), replicas(count)
    optimizer = scale_by_onebit_adam(mesh, freeze_step=4, block_size=64)
    state, update = optimizer.init(VECTOR), waiting(optimizer.update)
    for own in gradients(count, 12):
        updates, state = update(over(mesh, {"w": jnp.asarray(own)}), state)
        np.testing.assert_allclose(updates["w"], model.update(own), rtol=2e-4, atol=1e-5)
    assert int(state.frozen_at) == 4
    np.testing.assert_allclose(state.mu["w"], model.m, rtol=1e-4, atol=1e-6)


def test_one_replica_is_adam_with_a_frozen_variance():
    model = NumPyAdam(300, 1, 64, 4)
    model.compression.mean = lambda vectors: vectors[0]
    optimizer = scale_by_onebit_adam(replicas(1), freeze_step=4)
    state = optimizer.init(VECTOR)
    for own in gradients(1, 8):
        updates, state = waiting(optimizer.update)({"w": jnp.asarray(own)}, state)
        np.testing.assert_allclose(updates["w"], model.update(own), rtol=1e-4, atol=1e-6)


def test_momentum_is_bit_identical_on_all_replicas():
    mesh = replicas(8)
    optimizer = scale_by_onebit_adam(mesh, freeze_step=1)
    state, update = optimizer.init(VECTOR), waiting(optimizer.update)
    for own in gradients(8, 4):
        updates, state = update(over(mesh, {"w": jnp.asarray(own)}), state)
        for leaf in (updates["w"], state.mu["w"], state.nu["w"]):
            assert len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) == 1


def test_coordinates_without_variance_stay_put():
    optimizer = scale_by_onebit_adam(replicas(2), freeze_step=2)
    state, update = optimizer.init(VECTOR), waiting(optimizer.update)
    for k, own in enumerate(gradients(2, 6)):
        silent = own.copy()
        silent[:, 100:] = 0
        updates, state = update({"w": jnp.asarray(silent if k < 2 else own)}, state)
        assert not np.asarray(updates["w"][100:]).any()
        assert np.isfinite(updates["w"]).all()
        assert np.asarray(updates["w"][:100]).all()


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_freezes_once_the_variance_is_stable(decay):
    """Not before `1 / (1 - b2)` steps lie behind, and not while its norm still grows."""
    window = round(1 / (1 - decay))
    optimizer = scale_by_onebit_adam(replicas(2), freeze_step=None, b2=decay)
    state, update = optimizer.init(VECTOR), waiting(optimizer.update)
    norms = []
    for step in range(1, 80):
        own = jnp.full((2, 300), 2.0 if step > window + 3 else 1.0)
        _, state = update({"w": own}, state)
        norms.append(float(jnp.abs(state.nu["w"]).sum()))
        before = norms[step - 1 - window] if step > window else 0.0
        stable = step > window and min(norms[-1], before) >= 0.96 * max(norms[-1], before)
        if stable:
            assert int(state.frozen_at) == step
            break
        assert int(state.frozen_at) == 0
    else:
        pytest.fail("it never froze")
    _, state = update({"w": jnp.full((2, 300), 9.0)}, state)
    assert int(state.frozen_at) == step
    assert float(jnp.abs(state.nu["w"]).sum()) == norms[-1]


def test_clips_the_mean_before_the_freeze_and_each_replica_after():
    mesh, most = replicas(2), 0.5
    optimizer = scale_by_onebit_adam(mesh, freeze_step=1, max_norm=most, b1=0.0, block_size=512)
    adam = optax.chain(optax.clip_by_global_norm(most), optax.scale_by_adam(b1=0.0))
    state = optimizer.init(VECTOR)
    own = gradients(2, 2)
    updates, state = waiting(optimizer.update)({"w": jnp.asarray(own[0])}, state)
    expected, _ = waiting(adam.update)({"w": jnp.asarray(own[0].mean(0))}, adam.init(VECTOR))
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-5)
    own[1, 1] *= 1e-3  # short enough, and left alone
    _, state = waiting(optimizer.update)({"w": jnp.asarray(own[1])}, state)
    model = NumPyOneBit(300, 2, 512)
    clipped = np.stack([own[1, 0] * most / np.linalg.norm(own[1, 0]), own[1, 1]])
    np.testing.assert_allclose(state.mu["w"], model.mean(clipped), rtol=1e-4)


def test_parameters_over_the_stages_have_the_norm_of_the_whole_gradient():
    """Clipping must not depend on how parameters lie."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "data"))
    specs, most = {"w": PartitionSpec("stage")}, 0.5
    params = {"w": jnp.ones((4, 64))}
    make = functools.partial(scale_by_onebit_adam, freeze_step=1, max_norm=most, block_size=64)
    staged, alone = make(mesh, specs), make(replicas(2))
    states = staged.init(params), alone.init(params)
    for own in gradients(2, 4, 256).reshape(4, 2, 4, 64):
        tree = {"w": jnp.asarray(own)}
        updates, first = waiting(staged.update)(over(mesh, tree, specs), states[0])
        expected, second = waiting(alone.update)(tree, states[1])
        states = first, second
        np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-4, atol=1e-6)


def test_a_freeze_step_that_has_passed_freezes_at_once():
    early, late = (scale_by_onebit_adam(replicas(2), freeze_step=k) for k in (3, 9))
    state = late.init(VECTOR)
    for own in gradients(2, 5):
        _, state = waiting(late.update)({"w": jnp.asarray(own)}, state)
    _, state = waiting(early.update)({"w": jnp.asarray(own)}, state)
    assert int(state.frozen_at) == 6


def test_low_precision_parameters_have_moments_in_float32_that_can_be_donated():
    optimizer = onebit_adam(1e-2, replicas(2), freeze_step=1)
    params = {"w": jnp.ones(300, jnp.bfloat16)}
    state, update = optimizer.init(params), waiting(optimizer.update, donate_argnums=1)
    for own in gradients(2, 3):
        _, state = update({"w": jnp.asarray(own)}, state)
    assert state[0].mu["w"].dtype == jnp.float32


def test_trains():
    mesh, rng = replicas(4), np.random.default_rng(0)
    truth = rng.normal(size=60).astype(np.float32)
    optimizer = onebit_adam(
        optax.cosine_decay_schedule(0.05, 300), mesh, freeze_step=50, b2=0.9, max_norm=100.0
    )

    @waiting
    def step(params, state, x):
        def loss(params, x):
            return jnp.mean((x @ params["w"] - x @ truth) ** 2)

        grads = jax.vmap(jax.grad(loss), (None, 0))(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.zeros(60)}
    state = optimizer.init(params)
    for _ in range(300):
        x = jnp.asarray(rng.normal(size=(4, 16, 60)), jnp.float32)
        params, state = step(params, state, over(mesh, x))
    assert int(state[0].frozen_at) == 50
    assert np.abs(params["w"] - truth).max() < 0.05


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"freeze_step": 0}, r"freeze_step=0 must be at least 1"),
        ({"freeze_step": 5, "b1": 1.0}, r"b1=1.0 must be at least 0 and less than 1"),
        ({"freeze_step": 5, "b2": -0.1}, r"b2=-0.1"),
        ({"freeze_step": 5, "max_norm": 0.0}, r"max_norm=0.0 must be more than 0"),
        ({"freeze_step": 5, "block_size": 7}, r"block_size=7"),
    ],
)
def test_refuses(settings, said):
    with pytest.raises(ValueError, match=said):
        onebit_adam(1e-3, replicas(2), **settings)
