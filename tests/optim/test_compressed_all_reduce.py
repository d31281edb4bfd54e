"""The mean over replicas, compressed: what comes out, what is fed back, what is on the wire."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec
from optim.replicas import PARAMS, SIZES, NumPyOneBit, draw, over, replicas, waiting
from pipeline.hlo import parse

from jpipe.optim import Feedback, Reduction, compressed_all_reduce, wants_gradient_of_each_replica

METHODS = ["none", "bf16", "fp16", "int8", "onebit", "powersgd"]
LOSSY = METHODS[1:]


def leaves(tree):
    return [np.asarray(a, np.float64) for a in jax.tree.leaves(tree)]


def run(method, count, steps, params=PARAMS, **settings):
    """What came in, as means, what came out, and the last state."""
    mesh = replicas(count)
    transform = compressed_all_reduce(method, mesh, **settings)
    state, update = transform.init(params), waiting(transform.update)
    rng, came_in, came_out = np.random.default_rng(0), [], []
    for _ in range(steps):
        own = draw(rng, count, params)
        new, state = update(over(mesh, own), state)
        came_in.append([a.mean(0) for a in leaves(own)])
        came_out.append(leaves(new))
    return came_in, came_out, state


@pytest.mark.parametrize("count", SIZES)
def test_none_is_the_mean(count):
    came_in, came_out, _ = run("none", count, 1)
    for a, b in zip(came_in[0], came_out[0], strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_one_replica_compresses_nothing(method):
    came_in, came_out, state = run(method, 1, 1)
    for a, b in zip(came_in[0], came_out[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert not jax.tree.leaves(state)


@pytest.mark.slow
@pytest.mark.parametrize("count", SIZES[1:])
@pytest.mark.parametrize("method", LOSSY)
def test_nothing_is_lost_for_good(method, count):
    """Telescoping: what came in = what came out + what is still to be said, to round-off."""
    came_in, came_out, state = run(method, count, 12)
    mesh, params = replicas(count), jax.tree.leaves(PARAMS)
    total_in = [sum(step) for step in zip(*came_in, strict=True)]
    total_out = [sum(step) for step in zip(*came_out, strict=True)]
    if method == "powersgd":
        (left,) = (np.asarray(state.memory.error.value, np.float64).reshape(count, -1).mean(0),)
        names = [k for k, p in enumerate(params) if p.shape in ((13, 41), (2, 40, 24))]
        unsaid, first = [np.zeros(p.shape) for p in params], 0
        for k in names:
            unsaid[k] = left[first : first + params[k].size].reshape(params[k].shape)
            first += params[k].size
    else:
        layout = Reduction(method, mesh)._layout([p.shape for p in params])
        worker = np.asarray(state.memory.worker.value, np.float64).mean(0)
        server = np.asarray(state.memory.server.value, np.float64).reshape(worker.shape)
        unsaid = [
            np.asarray(a, np.float64) for a in layout.take_apart(jnp.asarray(worker + server))
        ]
    for said, still, all_of_it in zip(total_out, unsaid, total_in, strict=True):
        scale = max(np.abs(all_of_it).max(initial=0), 1e-30)
        np.testing.assert_allclose((said + still) / scale, all_of_it / scale, atol=2e-6)


@pytest.mark.parametrize("method", LOSSY)
def test_without_feedback_it_is_lost(method):
    _, _, state = run(method, 3, 3, feedback=Feedback(worker=False, server=False))
    unsaid = [state.memory.error] if method == "powersgd" else list(state.memory)
    assert not any(np.asarray(a.value).any() for a in unsaid)


@pytest.mark.parametrize("count", SIZES[1:])
@pytest.mark.parametrize("block_size", [8, 64, 1024])
def test_one_bit_is_the_algorithm_of_the_paper(count, block_size):
    params = {"w": jnp.ones(300)}
    came_in = np.random.default_rng(1).normal(size=(6, count, 300)).astype(np.float32)
    model, mesh = NumPyOneBit(300, count, block_size), replicas(count)
    transform = compressed_all_reduce("onebit", mesh, block_size=block_size)
    state, update = transform.init(params), waiting(transform.update)
    for own in came_in:
        new, state = update(over(mesh, {"w": jnp.asarray(own)}), state)
        np.testing.assert_allclose(new["w"], model.mean(own), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state.memory.worker.value, model.worker, rtol=1e-4, atol=1e-5)
    server = np.asarray(state.memory.server.value).reshape(model.server.shape)
    np.testing.assert_allclose(server, model.server, rtol=1e-4, atol=1e-5)


def test_power_sgd_is_exact_for_matrices_of_its_rank():
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 30, 3)), rng.normal(size=(2, 3, 20))
    own = {"w": jnp.asarray(np.stack([left @ right] * 3), jnp.float32)}
    transform = compressed_all_reduce("powersgd", replicas(3), rank=4)
    state = transform.init({"w": own["w"][0]})
    for _ in range(2):
        new, state = waiting(transform.update)(own, state)
    np.testing.assert_allclose(new["w"], left @ right, rtol=1e-4, atol=1e-4)


def test_power_sgd_wakes_up_after_zeros():
    transform = compressed_all_reduce("powersgd", replicas(2), rank=2)
    params = {"w": jnp.ones((10, 12))}
    state, update = transform.init(params), waiting(transform.update)
    zeros = {"w": jnp.zeros((2, 10, 12))}
    new, state = update(zeros, state)
    np.testing.assert_array_equal(new["w"], 0.0)
    new, state = update({"w": jnp.ones((2, 10, 12))}, state)
    np.testing.assert_allclose(new["w"], 1.0, rtol=1e-5)


@pytest.mark.parametrize("method", LOSSY)
def test_all_zeros_give_zeros(method):
    transform = compressed_all_reduce(method, replicas(3))
    zeros = jax.tree.map(lambda p: jnp.zeros((3, *p.shape)), PARAMS)
    state = transform.init(PARAMS)
    for _ in range(2):
        new, state = waiting(transform.update)(zeros, state)
        assert all((leaf == 0).all() for leaf in leaves(new))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_is_seen_in_the_mean(method, bad):
    transform = compressed_all_reduce(method, replicas(3))
    own = draw(np.random.default_rng(0), 3)
    own["matrix"] = own["matrix"].at[1, 5, 6].set(bad)
    new, _ = waiting(transform.update)(own, transform.init(PARAMS))
    assert not np.isfinite(np.asarray(new["matrix"])).all()


@pytest.mark.parametrize("method", METHODS)
def test_all_replicas_have_the_same_bits(method):
    mesh = replicas(8)
    transform = compressed_all_reduce(method, mesh)
    own = over(mesh, draw(np.random.default_rng(0), 8))
    new, _ = waiting(transform.update)(own, transform.init(PARAMS))
    for leaf in jax.tree.leaves(new):
        copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(leaf.addressable_shards) == 8
        assert len(copies) == 1


@pytest.mark.parametrize("method", METHODS)
def test_the_state_is_resumed_exactly(method, tmp_path):
    """Through plain NumPy files, as any checkpoint would."""
    mesh = replicas(3)
    transform = compressed_all_reduce(method, mesh)
    update, rng = waiting(transform.update), np.random.default_rng(0)
    owns = [over(mesh, draw(rng, 3)) for _ in range(4)]
    state = transform.init(PARAMS)
    for own in owns[:2]:
        _, state = update(own, state)
    arrays, structure = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *map(np.asarray, arrays))
    with np.load(tmp_path / "state.npz") as saved:
        restored = jax.tree.unflatten(structure, [jnp.asarray(saved[k]) for k in saved.files])
    for own in owns[2:]:
        expected, state = update(own, state)
        new, restored = update(own, restored)
        for a, b in zip(leaves(new), leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_lie_over_another_axis(method):
    """The stages' shards are compressed one by one, and stay where they are."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("stage", "data"))
    params = {"w": jnp.ones((4, 70)), "b": jnp.ones(5)}
    specs = {"w": PartitionSpec("stage"), "b": PartitionSpec()}
    transform = compressed_all_reduce(method, mesh, specs)
    own = draw(np.random.default_rng(0), 4, params)
    new, _ = waiting(transform.update)(over(mesh, own, specs), transform.init(params))
    assert new["w"].sharding.spec[0] == "stage"
    half = jax.tree.map(lambda a: a[:2] if a.ndim > 1 else a, params)
    for k in range(2):
        alone = compressed_all_reduce(method, replicas(4))
        of_stage = {"w": own["w"][:, 2 * k : 2 * k + 2], "b": own["b"]}
        expected, _ = waiting(alone.update)(of_stage, alone.init(half))
        np.testing.assert_allclose(new["w"][2 * k : 2 * k + 2], expected["w"], rtol=1e-6)
        np.testing.assert_allclose(new["b"], expected["b"], rtol=1e-6)


def test_keeps_the_dtype_of_its_updates():
    transform = compressed_all_reduce("bf16", replicas(2))
    own = {"w": jnp.ones((2, 9), jnp.float16)}
    new, _ = transform.update(own, transform.init({"w": own["w"][0]}))
    assert new["w"].dtype == jnp.float16
    with jax.enable_x64(True):
        transform = compressed_all_reduce("none", replicas(2))
        third = jnp.full((2, 9), 1 / 3, jnp.float64)
        new, _ = transform.update({"w": third}, transform.init({"w": third[0]}))
        np.testing.assert_array_equal(new["w"], np.float64(1 / 3))


WIRE = {  # of a model's usual sizes
    "kernel": jnp.ones((512, 512)),
    "embedding": jnp.ones((256, 512)),
    "bias": jnp.ones(512),
    "norm": jnp.ones(128),
}


def bytes_sent(method, count):
    """Bytes that one device sends in a step, by the compiled program."""
    mesh = replicas(count)
    transform = compressed_all_reduce(method, mesh)
    own = over(mesh, jax.tree.map(lambda p: jnp.ones((count, *p.shape)), WIRE))
    compiled = jax.jit(transform.update).lower(own, transform.init(WIRE)).compile()
    program = parse(compiled.as_text())
    total, found = 0.0, 0
    for instruction in program.within(program.entry):
        if not instruction.is_collective:
            continue
        found += 1
        share = (count - 1) / count
        # All-to-all and all-gather send what others lack; a ring all-reduce does both.
        total += instruction.num_bytes * share * (2 if "reduce" in instruction.opcode else 1)
    return total, found


@pytest.mark.parametrize(
    ("method", "least"), [("bf16", 2), ("fp16", 2), ("int8", 3.9), ("onebit", 25)]
)
@pytest.mark.parametrize("count", [2, 8])
def test_bytes_on_the_wire(method, least, count):
    full, _ = bytes_sent("none", count)
    numbers = sum(p.size for p in WIRE.values())
    assert full == pytest.approx(2 * (count - 1) / count * 4 * numbers)
    compressed, exchanges = bytes_sent(method, count)
    assert exchanges == 2, "two exchanges for all leaves together"
    assert full / compressed >= least * 0.995  # the last block of a leaf is filled up


def test_power_sgd_exchanges_twice():
    sent, exchanges = bytes_sent("powersgd", 8)
    assert exchanges == 2
    assert bytes_sent("none", 8)[0] / sent > 15


def test_optimizers_that_take_the_mean_themselves_are_told_by_their_state():
    mesh = replicas(2)
    for method in METHODS:
        chain = optax.chain(compressed_all_reduce(method, mesh), optax.adam(1e-3))
        assert wants_gradient_of_each_replica(chain.init(PARAMS))
    assert not wants_gradient_of_each_replica(optax.adam(1e-3).init(PARAMS))


def test_works_with_plain_data_parallelism():
    """Without a pipeline: `vmap` of the gradient over parts of the batch, and any optimizer."""
    mesh, rng = replicas(8), np.random.default_rng(0)
    truth = rng.normal(size=(60,)).astype(np.float32)
    optimizer = optax.chain(compressed_all_reduce("onebit", mesh), optax.sgd(0.005, momentum=0.9))

    def loss(params, batch):
        x, y = batch
        return jnp.mean((x @ params["w"] - y) ** 2)

    @waiting
    def step(params, state, batch):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.zeros(60)}
    state = optimizer.init(params)
    for _ in range(400):
        x = rng.normal(size=(8, 16, 60)).astype(np.float32)
        params, state = step(params, state, over(mesh, (x, x @ truth)))
    assert np.abs(params["w"] - truth).max() < 0.05


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "zip"}, r"method='zip' is none of none, bf16"),
        ({"method": "int8", "block_size": 12}, r"block_size=12 must be a positive multiple of 8"),
        ({"method": "int8", "block_size": 0}, r"block_size=0"),
        ({"method": "powersgd", "rank": 0}, r"rank=0 must be at least 1"),
    ],
)
def test_refuses_settings(settings, said):
    with pytest.raises(ValueError, match=said):
        compressed_all_reduce(mesh=replicas(2), **settings)


def test_refuses_gradients_that_are_already_a_mean():
    transform = compressed_all_reduce("int8", replicas(2))
    params = {"w": jnp.ones((5, 3))}
    with pytest.raises(ValueError, match=r"\['w'\] has shape \(5, 3\).*2 replicas.*per_replica"):
        transform.update(params, transform.init(params))


def test_refuses_specs_that_do_not_fit():
    mesh, params = replicas(2), {"w": jnp.ones((4, 3))}
    with pytest.raises(ValueError, match=r"specs has the structure .*param_specs"):
        compressed_all_reduce("int8", mesh, {"v": PartitionSpec()}).init(params)
    with pytest.raises(ValueError, match=r"specs lays a parameter over 'data'"):
        compressed_all_reduce("int8", mesh, {"w": PartitionSpec("data")}).init(params)
