"""What stages send each other, verified: the same bits, and no flipped one gets through."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parity import models
from parity.cases import WAYS, place
from parity.test_chunks import chunked
from parity.test_segments import bits, in_segments

import jpipe.pipeline.executor
from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    INTACT,
    describe_mismatches,
    param_shardings,
    pipeline_value_and_grad,
)
from jpipe.schedule import SCHEDULES, Op, make_schedule
from jpipe.train_step import init_train_state, make_segmented_step, make_train_step

P, M = 4, 5


def build(problem, mesh, schedule, **settings):
    return pipeline_value_and_grad(
        problem.stages, problem.loss, mesh, schedule, verify=True, **settings
    )


@contextlib.contextmanager
def flipped(monkeypatch, stage, tick, *, bit=0, replica=None, crc=False):
    """While entered, programs are traced in which a bit of what a stage sends in a tick flips."""
    send = jpipe.pipeline.executor.send

    def flip(array, here):
        number = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
        whole = jax.lax.bitcast_convert_type(array, number).reshape(-1)
        whole = whole.at[len(whole) // 2].set(whole[len(whole) // 2] ^ number.type(1 << bit))
        whole = jax.lax.bitcast_convert_type(whole.reshape(array.shape), array.dtype)
        return jnp.where(here, whole, array)

    def wrong(sealed, schedule, num_lanes, beat, row, axis):
        here = (jax.lax.axis_index("stage") == stage) & (row.tick == tick)
        if replica is not None:
            here &= jax.lax.axis_index("data") == replica
        if crc:
            sealed = sealed._replace(crc32=flip(sealed.crc32, here))
        else:
            leaves, tree = jax.tree.flatten(sealed.payload)
            leaves[0] = flip(leaves[0], here)
            sealed = sealed._replace(payload=tree.unflatten(leaves))
        return send(sealed, schedule, num_lanes, beat, row, axis)

    with monkeypatch.context() as patched:
        patched.setattr(jpipe.pipeline.executor, "send", wrong)
        yield


def travels(table, count, seed=0):
    """Some of what is sent: who sends when, and who reads it when."""
    found = []
    for t, s in zip(*np.nonzero(np.isin(table.op, (Op.FORWARD, Op.BACKWARD))), strict=True):
        op, v = Op(int(table.op[t, s])), int(table.virtual_stage[t, s])
        source = table.source_of(op, v)
        if source is not None:
            made = table.tick_of(op)[table.microbatch[t, s], source]
            found.append((table.stage_of(source), made + table.hop - 1, int(s), int(t)))
    return [found[i] for i in np.random.default_rng(seed).choice(len(found), count, False)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_bits_and_a_flipped_one_is_found(schedule, monkeypatch):
    problem, mesh = models.mlp(8, M), make_mesh(P)
    arguments, table = place(problem, mesh), make_schedule(schedule, P, M, 1)
    plain = pipeline_value_and_grad(problem.stages, problem.loss, mesh, table)(*arguments)
    *verified, mismatches = build(problem, mesh, table)(*arguments)
    assert bits(verified) == bits(plain)
    assert mismatches.shape == mesh.devices.shape
    assert (np.asarray(mismatches) == INTACT).all()
    assert not list(describe_mismatches(mismatches, table, mesh))

    ((sender, sent, reader, read),) = travels(table, 1, seed=len(table.name))
    with flipped(monkeypatch, sender, sent, bit=sent % 32):
        *_, mismatches = build(problem, mesh, table)(*arguments)
    found = np.asarray(mismatches)
    assert found[reader].item() == read
    assert (found == INTACT).sum() == P - 1
    (told,) = describe_mismatches(mismatches, table, mesh)
    what = "activations" if table.op[read, reader] == Op.FORWARD else "gradients"
    microbatch = table.microbatch[read, reader]
    assert told == (
        f"the {what} of microbatch {microbatch} from stage {sender} to stage {reader}, "
        f"read in tick {read}"
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_lost_exchange_is_found(schedule, monkeypatch):
    """The inbox then still has what came before, with the checksum that it came with."""
    problem, mesh = models.mlp(4, M), make_mesh(P)
    arguments, table = place(problem, mesh), make_schedule(schedule, P, M, 1)
    deliver = jpipe.pipeline.executor.deliver
    for _, sent, reader, read in travels(table, 2):

        def lost(inbox, arrived, slots, row, here=(reader, sent)):
            whole = deliver(inbox, arrived, slots, row)
            stays = (jax.lax.axis_index("stage") == here[0]) & (row.tick == here[1])
            return jax.tree.map(lambda old, new: jnp.where(stays, old, new), inbox, whole)

        with monkeypatch.context() as patched:
            patched.setattr(jpipe.pipeline.executor, "deliver", lost)
            *_, mismatches = build(problem, mesh, table)(*arguments)
        assert np.asarray(mismatches)[reader].item() == read


@pytest.mark.parametrize("schedule", WAYS)
def test_a_damaged_checksum_is_found_too(schedule, monkeypatch):
    problem, mesh = models.mlp(4, 2), make_mesh(2)
    table = make_schedule(schedule, 2, 2, 1)
    ((sender, sent, reader, read),) = travels(table, 1)
    with flipped(monkeypatch, sender, sent, bit=31, crc=True):
        *_, mismatches = build(problem, mesh, table)(*place(problem, mesh))
    assert np.asarray(mismatches)[reader].item() == read


def test_stages_that_differ(monkeypatch):
    problem, mesh = models.uneven((8, 8, 16, 4, 3), M), make_mesh(P)
    table, arguments = make_schedule("1f1b", P, M, 1), place(problem, mesh)
    plain = pipeline_value_and_grad(problem.stages, problem.loss, mesh, table)(*arguments)
    *verified, mismatches = build(problem, mesh, table)(*arguments)
    assert bits(verified) == bits(plain)
    assert (np.asarray(mismatches) == INTACT).all()
    ((sender, sent, reader, read),) = travels(table, 1)
    with flipped(monkeypatch, sender, sent):
        *_, mismatches = build(problem, mesh, table)(*arguments)
    assert np.asarray(mismatches)[reader].item() == read


def test_one_of_several_replicas(monkeypatch):
    problem, mesh = models.mlp(4, 3, size=4), make_mesh(2, 2)
    table, arguments = make_schedule("1f1b", 2, 3, 1), place(problem, mesh)
    ((sender, sent, reader, read),) = travels(table, 1)
    with flipped(monkeypatch, sender, sent, replica=1):
        *_, mismatches = build(problem, mesh, table)(*arguments)
    found = np.asarray(mismatches).reshape(2, 2)
    assert found[reader, 1] == read
    assert (found == INTACT).sum() == 3
    (told,) = describe_mismatches(mismatches, table, mesh)
    assert f"to stage {reader}, data 1, read in tick {read}" in told


def test_dtypes(monkeypatch):
    problem, mesh = models.mlp(4, 3, dtype=jnp.bfloat16), make_mesh(2)
    table, arguments = make_schedule("1f1b", 2, 3, 1), place(problem, mesh)
    *_, mismatches = build(problem, mesh, table)(*arguments)
    assert (np.asarray(mismatches) == INTACT).all()
    ((sender, sent, reader, read),) = travels(table, 1)
    with flipped(monkeypatch, sender, sent, bit=15):
        *_, mismatches = build(problem, mesh, table)(*arguments)
    assert np.asarray(mismatches)[reader].item() == read


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble-v"])
def test_chunks(schedule, monkeypatch):
    problem, mesh = chunked(models.mlp(4, 4), 2), make_mesh(2)
    table = make_schedule(schedule, 2, 4, 2)
    arguments = place(problem, mesh)
    *_, mismatches = build(problem, mesh, table)(*arguments)
    assert (np.asarray(mismatches) == INTACT).all()
    for sender, sent, reader, read in travels(table, 2):
        with flipped(monkeypatch, sender, sent):
            *_, mismatches = build(problem, mesh, table)(*arguments)
        assert np.asarray(mismatches)[reader].item() == read


def test_in_segments(monkeypatch):
    problem, mesh = models.mlp(4, M), make_mesh(2)
    table = make_schedule("1f1b", 2, M, 1)
    expected = build(problem, mesh, table)(*place(problem, mesh))
    found, _ = in_segments(problem, table, mesh, 2, verify=True)
    assert bits(found) == bits(expected)
    ((sender, sent, reader, read),) = travels(table, 1)
    with flipped(monkeypatch, sender, sent):
        (*_, mismatches), _ = in_segments(problem, table, mesh, 2, verify=True)
    assert np.asarray(mismatches)[reader].item() == read


@pytest.mark.parametrize("optimizer", [optax.adam(1e-2), optax.sgd(1e-2, momentum=0.9)])
def test_a_damaged_step_changes_nothing(optimizer, monkeypatch):
    problem, mesh = models.mlp(4, 3), make_mesh(2)
    table = make_schedule("1f1b", 2, 3, 1)
    _, *batch = place(problem, mesh)

    def fresh():
        return init_train_state(lambda: problem.params, optimizer, mesh)

    def step():
        return make_train_step(problem.stages, problem.loss, optimizer, mesh, table, verify=True)

    ((sender, sent, reader, read),) = travels(table, 1)
    with flipped(monkeypatch, sender, sent, bit=30):
        state, metrics = step()(fresh(), *batch)
    assert bits(state) == bits(fresh())
    assert np.asarray(metrics.mismatches)[reader].item() == read
    state, metrics = step()(state, *batch)
    expected, _ = step()(fresh(), *batch)
    assert bits(state) == bits(expected)
    assert (np.asarray(metrics.mismatches) == INTACT).all()


def test_damage_is_known_after_the_segment_that_reads(monkeypatch):
    problem, mesh, optimizer = models.mlp(4, M), make_mesh(2), optax.sgd(1e-2)
    table = make_schedule("1f1b", 2, M, 1)
    state = init_train_state(lambda: problem.params, optimizer, mesh)
    _, *batch = place(problem, mesh)
    ((sender, sent, reader, read),) = travels(table, 1)
    with flipped(monkeypatch, sender, sent):
        step = make_segmented_step(
            problem.stages, problem.loss, optimizer, mesh, table, 1, verify=True
        )
        carry, seen = step.start(state, *batch), []
        for first in step.firsts:
            carry = jax.block_until_ready(step.advance(carry, first, state, *batch))
            seen.append(np.asarray(step.mismatches(carry))[reader].item())
    period = table.period or 1
    expected = [
        read if (first + step.firsts.step) * period > read else INTACT for first in step.firsts
    ]
    assert seen == expected
    assert INTACT in seen
    assert read in seen


def test_refused_where_xla_divides_activations():
    problem, state, key = models.carrying(4, 4, size=4)
    mesh = make_mesh(2, 2)
    state = jax.device_put(state, param_shardings(mesh, state))
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, verify=True)
    with pytest.raises(ValueError, match=r"verify=True.*over 'data' XLA divides.*per_replica"):
        run(*place(problem, mesh), state, key)
    apart = pipeline_value_and_grad(
        problem.stages, problem.loss, mesh, verify=True, per_replica=True
    )
    *_, mismatches = apart(*place(problem, mesh), state, key)
    assert (np.asarray(mismatches) == INTACT).all()


def test_one_stage_has_nothing_to_verify():
    problem, mesh = models.mlp(2, 3), make_mesh(1)
    arguments = place(problem, mesh)
    plain = pipeline_value_and_grad(problem.stages, problem.loss, mesh, "1f1b")(*arguments)
    *verified, mismatches = build(problem, mesh, "1f1b")(*arguments)
    assert bits(verified) == bits(plain)
    assert (np.asarray(mismatches) == INTACT).all()


@pytest.mark.parametrize(
    ("mismatches", "said"),
    [
        (None, r"must be integers of shape \(2, 1, 1\)"),
        ([3, 3], r"must be integers of shape \(2, 1, 1\)"),
        ([[[INTACT]], [[99]]], "has no tick 99"),
        ([[[2]], [[INTACT]]], "in tick 2 of the table '1f1b' stage 0 reads nothing"),
    ],
)
def test_refuses_what_no_verified_step_returned(mismatches, said):
    table = make_schedule("1f1b", 2, 3, 1)
    with pytest.raises(ValueError, match=said):
        list(describe_mismatches(mismatches, table, make_mesh(2)))
