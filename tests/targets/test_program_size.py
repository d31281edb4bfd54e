"""A compiled step does not grow with microbatches or equal stages, and with blocks linearly."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from pipeline import hlo

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import GPT, GPTConfig, next_token_loss
from jpipe.train_step import abstract_train_state, make_train_step

SIZE, CONTEXT = 2, 8


@functools.cache
def num_instructions(schedule, num_stages, num_microbatches, num_blocks):
    config = GPTConfig(vocab_size=20, context=CONTEXT, layers=num_blocks, width=16, heads=2)
    # Without a place to cut, stages are alike.
    differ = num_blocks % num_stages > 0
    model = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs),
        stem="embedding",
        body="blocks",
        head="head",
        num_stages=num_stages if differ else None,
        inputs=jax.ShapeDtypeStruct((SIZE, CONTEXT), jnp.int32) if differ else None,
    )
    mesh, optimizer = make_mesh(num_stages), optax.sgd(1e-3)
    state = abstract_train_state(lambda: model.init(nnx.Rngs(0)), optimizer, mesh)
    tokens = jax.ShapeDtypeStruct((num_microbatches, SIZE, CONTEXT), jnp.int32)
    step = make_train_step(model.stages, next_token_loss, optimizer, mesh, schedule)
    return hlo.parse(step.lower(state, tokens, tokens).compile().as_text()).num_instructions


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-overlap"])
def test_more_microbatches_or_equal_stages_make_no_longer_program(schedule):
    small = num_instructions(schedule, 2, 4, num_blocks=2)
    assert num_instructions(schedule, 2, 64, num_blocks=2) == small
    assert num_instructions(schedule, 8, 8, num_blocks=8) == pytest.approx(small, rel=0.01)


@pytest.mark.slow
def test_stages_that_differ_take_what_their_blocks_take():
    small, large = (num_instructions("1f1b", p, 8, num_blocks=2 * p - 1) for p in (2, 8))
    assert large / 15 < 1.2 * small / 3
