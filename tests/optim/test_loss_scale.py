"""Dynamic loss scaling: the rules of torch's GradScaler, and what a skipped step leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from optim.replicas import replicas

from jpipe.optim import LossScaleError, check_loss_scale, dynamic_loss_scale, loss_scale

BAD = [float("inf"), float("-inf"), float("nan")]
PARAMS = {"a": jnp.array([1.0, -0.0, 0.0, 3.0]), "b": jnp.array([[2.0]])}


def bits(tree):
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


def gradient(value):
    return jax.tree.map(lambda p: jnp.full_like(p, value), PARAMS)


class TorchScaler:
    """`torch.amp.GradScaler.update`, written down from its documentation."""

    def __init__(self, scale, growth, backoff, interval):
        self.scale, self.tracker = np.float32(scale), 0
        self.growth, self.backoff, self.interval = map(np.float32, (growth, backoff, interval))

    def update(self, found_inf):
        if found_inf:
            self.scale *= self.backoff
            self.tracker = 0
            return
        self.tracker += 1
        if self.tracker == self.interval:
            with np.errstate(over="ignore"):
                grown = self.scale * self.growth
            self.scale = grown if np.isfinite(grown) else self.scale
            self.tracker = 0


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 5),
    st.sampled_from([2.0**16, 2.0**126, 3.0]),
)
def test_follows_torch_to_the_step(overflows, interval, init):
    optimizer = dynamic_loss_scale(
        optax.sgd(1.0), init=init, growth_interval=interval, min_scale=2.0**-149
    )
    state, torch = optimizer.init(PARAMS), TorchScaler(init, 2.0, 0.5, interval)
    update = jax.jit(optimizer.update)
    for overflow in overflows:
        _, state = update(gradient(np.inf if overflow else 1.0), state, PARAMS)
        torch.update(overflow)
        assert float(loss_scale(state)) == float(torch.scale)


def test_grows_after_exactly_the_interval():
    optimizer = dynamic_loss_scale(optax.sgd(1.0), init=8.0, growth_interval=2000)
    state = optimizer.init(PARAMS)
    step = jax.jit(lambda s, _: (optimizer.update(gradient(1.0), s)[1], s.scale))
    state, seen = jax.lax.scan(step, state, length=4000)
    assert seen[1999] == 8.0
    assert seen[2000] == 16.0
    assert float(state.scale) == 32.0


@pytest.mark.parametrize("bad", BAD)
def test_a_skipped_step_changes_no_bit(bad):
    optimizer = dynamic_loss_scale(optax.adamw(0.1, weight_decay=0.1))
    state, params = optimizer.init(PARAMS), PARAMS
    updates, state = optimizer.update(gradient(2.0), state, params)
    params = optax.apply_updates(params, updates)
    params["a"] = params["a"].at[1].set(-0.0)
    poisoned = gradient(1.0)
    poisoned["a"] = poisoned["a"].at[2].set(bad)
    updates, after = jax.jit(optimizer.update)(poisoned, state, params)
    assert bits(optax.apply_updates(params, updates)) == bits(params)
    assert bits(after.inner) == bits(state.inner)
    assert float(after.scale) == float(state.scale) / 2
    assert int(after.skipped_in_a_row) == int(after.skipped) == 1
    _, after = optimizer.update(gradient(1.0), after, params)
    assert int(after.skipped_in_a_row) == 0
    assert int(after.skipped) == 1


def test_without_overflow_it_is_the_inner_optimizer():
    inner = optax.adam(0.1)
    optimizer = dynamic_loss_scale(inner)
    state, plain = optimizer.init(PARAMS), inner.init(PARAMS)
    for value in (1.0, -0.5, 3.0):
        scaled = jax.tree.map(lambda g, s=state.scale: g * s, gradient(value))
        updates, state = optimizer.update(scaled, state, PARAMS)
        expected, plain = inner.update(gradient(value), plain, PARAMS)
        assert bits(updates) == bits(expected)


def test_float16_gradients_are_divided_in_float32():
    """2^-20 * 2^-16 is no float16 number."""
    optimizer = dynamic_loss_scale(optax.identity(), init=2.0**16)
    params = {"w": jnp.ones(3, jnp.float16)}
    scaled = {"w": jnp.full(3, 2.0**-20, jnp.float16)}
    updates, _ = optimizer.update(scaled, optimizer.init(params), params)
    assert updates["w"].dtype == jnp.float32
    np.testing.assert_array_equal(updates["w"], np.float32(2.0**-36))


def test_its_state_can_be_donated_and_keeps_its_dtypes():
    optimizer = dynamic_loss_scale(optax.adam(0.1))
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    state = optimizer.init(params)
    dtypes = [a.dtype for a in jax.tree.leaves(state)]
    update = jax.jit(optimizer.update, donate_argnums=1)
    _, state = update({"w": jnp.ones(3, jnp.bfloat16)}, state, params)
    assert [a.dtype for a in jax.tree.leaves(state)] == dtypes


def test_two_scales_for_one_loss_are_refused():
    both = optax.chain(dynamic_loss_scale(optax.sgd(1.0)), dynamic_loss_scale(optax.sgd(1.0)))
    with pytest.raises(ValueError, match="2 loss scales"):
        loss_scale(both.init(PARAMS))


def test_the_scale_stays_at_its_floor_and_then_it_is_an_error():
    optimizer = dynamic_loss_scale(optax.sgd(1.0), init=8.0, min_scale=2.0)
    state = optimizer.init(PARAMS)
    for _ in range(21):
        check_loss_scale(state)
        _, state = optimizer.update(gradient(np.nan), state, PARAMS)
    assert float(state.scale) == 2.0
    with pytest.raises(LossScaleError, match=r"last 21 steps .* down to 2:"):
        check_loss_scale(state)
    check_loss_scale(state, max_skipped=21)
    check_loss_scale(optax.sgd(1.0).init(PARAMS))  # nothing to say of other optimizers


def test_many_skips_on_the_way_down_are_no_error():
    optimizer = dynamic_loss_scale(optax.sgd(1.0), init=2.0**40)
    state = optimizer.init(PARAMS)
    for _ in range(30):
        _, state = optimizer.update(gradient(np.inf), state, PARAMS)
        check_loss_scale(state)


def test_devices_agree_inside_of_shard_map():
    """One infinite number on one device: all skip, and all have one scale."""
    mesh, optimizer = replicas(4), dynamic_loss_scale(optax.sgd(1.0), axis_name="data")
    params = {"w": jnp.ones(8)}

    def step(params, grads):
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates), state.scale[None]

    spec = PartitionSpec("data")
    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)
    )
    new, scales = run(params, {"w": jnp.ones(8).at[5].set(jnp.inf)})
    assert bits(new) == bits(params)
    np.testing.assert_array_equal(scales, 2.0**15)


def test_sum_then_divide_would_overflow():
    """float16, S = 2^13, M = 8, g = 1.5: the sum of what travels is beyond float16."""
    scale, num_microbatches = jnp.float32(2.0**13), 8
    seed = (scale / num_microbatches).astype(jnp.float16)
    of_one = seed * jnp.float16(1.5)  # what one microbatch's backward makes
    naive = jnp.float16(0)
    for _ in range(num_microbatches):
        naive += scale.astype(jnp.float16) * jnp.float16(1.5)
    assert jnp.isinf(naive)
    total = sum(of_one.astype(jnp.float32) for _ in range(num_microbatches))
    optimizer = dynamic_loss_scale(optax.identity(), init=2.0**13)
    grads = {"w": total}
    updates, _ = optimizer.update(grads, optimizer.init(grads))
    assert float(updates["w"]) == 1.5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"init": 0.5}, r"init=0.5 and min_scale=1.0"),
        ({"min_scale": 0.0}, r"min_scale=0.0"),
        ({"init": float("nan")}, r"init=nan"),
        ({"growth_factor": 1.0}, r"growth_factor=1.0 must be more than 1"),
        ({"backoff_factor": 1.0}, r"backoff_factor=1.0 must be between"),
        ({"growth_interval": 0}, r"growth_interval=0 must be at least 1"),
    ],
)
def test_refuses(settings, said):
    with pytest.raises(ValueError, match=said):
        dynamic_loss_scale(optax.sgd(1.0), **settings)
