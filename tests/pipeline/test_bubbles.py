"""What lies in a bubble reaches nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity.cases import pipeline_numbers
from pipeline.variants import P, assert_parity, base, model

from jpipe.schedule import SCHEDULES


def unit(x):
    """NaN of zeros, and so is its gradient."""
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True))


POISON = {
    "stem": lambda: model(stem=lambda p, x: unit(x) @ p["w"]),
    "body": lambda: model(block=lambda p, x: unit(x) @ p["w"] + jnp.log(jnp.abs(x)) + p["b"]),
    "head": lambda: model(head=lambda p, x: unit(x) @ p["w"] + p["b"]),
    "loss": lambda: model(loss=lambda y, t: jnp.mean(jnp.log(jnp.abs(y)) * t)),
}


@pytest.mark.parametrize("where", POISON)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bubbles_do_not_reach_a_gradient(schedule, where):
    assert_parity(POISON[where](), schedule)


def test_nothing_in_a_bubble_raises_an_alarm():
    with jax.debug_nans(True):
        pipeline_numbers(POISON["body"](), "1f1b", P)


def test_a_bad_microbatch_is_not_hidden():
    problem = base()._replace(inputs=base().inputs.at[2].set(jnp.nan))
    loss, grads = pipeline_numbers(problem, "1f1b", P)
    assert np.isnan(loss)
    assert all(np.isnan(g).any() for g in jax.tree.leaves(grads))


def test_padding_behind_a_mask_may_be_nan():
    def loss(y, t):
        padding = jnp.isnan(t)
        return jnp.mean(jnp.where(padding, 0, (y - jnp.where(padding, 0, t)) ** 2))

    targets = base().targets.at[:, 0].set(jnp.nan)
    assert_parity(model(targets=targets, loss=loss))
