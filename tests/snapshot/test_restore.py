"""What a snapshot holds, laid out as a state is, on this mesh or another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parity import models
from parity.test_chunks import chunked, joined
from snapshot.states import bits, trained
from snapshot.test_store import EXTRA, STATE, write

from jpipe.mesh import make_mesh
from jpipe.optim import PerDevice, compressed_all_reduce
from jpipe.pipeline import param_specs
from jpipe.snapshot import MismatchError, SnapshotStore, newest_good
from jpipe.train_step import init_train_state


def test_a_training_state_comes_back_bit_by_bit(tmp_path):
    state, fresh, step = trained()
    store = SnapshotStore(tmp_path)
    before = bits(state)
    store.save(state, 4, EXTRA)
    state = step(state)  # donates what is being written
    store.close()
    snapshot = newest_good(tmp_path)
    assert snapshot.manifest.step == 4
    assert snapshot.manifest.extra == EXTRA
    restored, left = snapshot.restore(fresh())
    assert bits(restored) == before
    assert left == []
    assert bits(step(restored)) == bits(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(fresh()), strict=True):
        assert a.sharding == b.sharding


def test_typed_keys_and_empty_arrays(tmp_path):
    state = {"key": jax.random.key(3, impl="rbg"), "none": jnp.zeros((0, 3)), "x": jnp.ones(2)}
    write(tmp_path, state=state)
    other = {"key": jax.random.key(0, impl="rbg"), "none": jnp.zeros((0, 3)), "x": jnp.zeros(2)}
    restored, _ = newest_good(tmp_path).restore(other)
    assert bits(restored) == bits(state)
    assert jax.random.key_impl(restored["key"]) == jax.random.key_impl(state["key"])


def test_shapes_are_enough_to_restore(tmp_path):
    state, _, _ = trained()
    state = {"trained": state, "key": jax.random.key(3, impl="rbg"), "none": jnp.zeros((0, 3))}
    write(tmp_path, state=state)

    def shape(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    restored, left = newest_good(tmp_path).restore(jax.tree.map(shape, state))
    assert bits(restored) == bits(state)
    assert left == []
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert a.sharding == b.sharding
    nowhere = jax.eval_shape(lambda: STATE)
    write(tmp_path / "small", state=STATE)
    small, _ = newest_good(tmp_path / "small").restore(nowhere)
    assert bits(small) == bits(STATE)


def test_what_each_device_has_of_its_own_is_left_on_another_mesh(tmp_path):
    own = {"x": jnp.ones(3), "e": PerDevice(jnp.ones((2, 2, 1, 5)))}
    write(tmp_path, state=own)
    other = {"x": jnp.zeros(3), "e": PerDevice(jnp.full((4, 1, 1, 5), 2.0))}
    restored, left = newest_good(tmp_path).restore(other)
    np.testing.assert_array_equal(restored["x"], 1.0)
    np.testing.assert_array_equal(restored["e"].value, 2.0)
    assert len(left) == 1


def test_what_each_device_has_of_its_own_is_left_where_blocks_move(tmp_path):
    """With chunks a device has other blocks, though as many numbers."""
    problem = models.mlp(4, 4, size=8, width=32)
    there, here = (
        init_train_state(lambda p=p: p.params, powersgd(make_mesh(2, 2), p.params), make_mesh(2, 2))
        for p in (problem, chunked(problem, 2))
    )
    errors = [state.opt_state[0].memory.error.value for state in (there, here)]
    assert errors[0].shape == errors[1].shape
    write(tmp_path, state=there)
    restored, left = newest_good(tmp_path).restore(here)
    assert len(left) == len(jax.tree.leaves(here.opt_state[0].memory))
    assert bits(joined(restored.params.body)) == bits(there.params.body)
    _, left = newest_good(tmp_path).restore(there)
    assert left == []

    def shape(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    with pytest.raises(MismatchError, match="give arrays for it, as a fresh state has them"):
        newest_good(tmp_path).restore(jax.tree.map(shape, here))


def powersgd(mesh, params):
    reduce = compressed_all_reduce("powersgd", mesh, param_specs(mesh, params), rank=2)
    return optax.chain(reduce, optax.sgd(0.1))
