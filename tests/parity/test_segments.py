"""A step in segments has the bits of a step as a whole, wherever it is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import models
from parity.cases import WAYS, place
from parity.test_chunks import chunked

from jpipe.mesh import make_mesh
from jpipe.pipeline import param_shardings, pipeline_segments, pipeline_value_and_grad
from jpipe.schedule import SCHEDULES, make_schedule


def bits(tree):
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


def through_the_host(carry):
    """As from a snapshot."""
    return jax.tree.map(lambda a: jax.device_put(np.array(a), a.sharding), carry)


def in_segments(problem, schedule, mesh, microbatches, *rest, **settings):
    segments = pipeline_segments(
        problem.stages, problem.loss, mesh, schedule, microbatches=microbatches, **settings
    )
    start, finish = jax.jit(segments.start), jax.jit(segments.finish)
    advance = jax.jit(segments.advance, donate_argnums=0)
    state, key, scale = (*rest, None, None, None)[:3]
    arguments = (*place(problem, mesh), state, key, scale)
    carry = start(*arguments)
    for first in segments.firsts:
        carry = through_the_host(carry)
        carry = advance(carry, first, *arguments)
    assert advance._cache_size() == 1, "a segment must not compile again"
    return finish(carry, *arguments), len(segments.firsts)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_microbatches", "every"), [(5, 1), (16, 5), (5, 16)])
def test_same_bits(schedule, num_microbatches, every):
    problem, mesh = models.mlp(8, num_microbatches), make_mesh(4)
    table = make_schedule(schedule, 4, num_microbatches, 1)
    whole = pipeline_value_and_grad(problem.stages, problem.loss, mesh, table)
    found, count = in_segments(problem, table, mesh, every)
    assert bits(found) == bits(whole(*place(problem, mesh)))
    assert count >= max(1, num_microbatches // every)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", WAYS)
def test_stages_that_differ(schedule):
    problem, mesh = models.uneven((8, 8, 16, 4, 3), 5), make_mesh(4)
    table = make_schedule(schedule, 4, 5, 1)
    whole = pipeline_value_and_grad(problem.stages, problem.loss, mesh, table)
    found, _ = in_segments(problem, table, mesh, 2)
    assert bits(found) == bits(whole(*place(problem, mesh)))


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble-v"])
def test_chunks(schedule):
    problem, mesh = chunked(models.mlp(8, 5), 2), make_mesh(4)
    table = make_schedule(schedule, 4, 5, 2)
    whole = pipeline_value_and_grad(problem.stages, problem.loss, mesh, table)
    found, _ = in_segments(problem, table, mesh, 2)
    assert bits(found) == bits(whole(*place(problem, mesh)))


def test_state_keys_and_replicas():
    problem, state, key = models.carrying(4, 5, size=4)
    mesh = make_mesh(2, 2)
    state = jax.device_put(state, param_shardings(mesh, state))
    table = make_schedule("1f1b", 2, 5, 1)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, table, per_replica=True)
    scale = jnp.float32(8)
    expected = run(*place(problem, mesh), state, key, scale)
    found, _ = in_segments(problem, table, mesh, 2, state, key, scale, per_replica=True)
    assert bits(found) == bits(expected)


def test_refuses():
    problem, table = models.mlp(4, 5), make_schedule("1f1b", 4, 5, 1)
    with pytest.raises(ValueError, match="microbatches=0"):
        pipeline_segments(problem.stages, problem.loss, make_mesh(4), table, microbatches=0)
