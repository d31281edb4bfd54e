"""A state by name, and again on another number of stages."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from snapshot.states import bits

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import GPT, GPTConfig
from jpipe.snapshot import MismatchError
from jpipe.snapshot.leaves import places, raw, rebuild
from jpipe.train_step import init_train_state

LAYOUTS = {"4": (4, 1), "2": (2, 1), "3": (3, 1), "5": (5, 1), "2 of 2": (2, 2), "2 of 3": (2, 3)}
OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-3),
    "sgd": lambda: optax.sgd(1e-3),
    "more": lambda: optax.chain(optax.trace(0.9), optax.adam(1e-3)),
    "masked": lambda: optax.masked(
        optax.adam(1e-3), lambda p: jax.tree.map(lambda a: a.size > 40, p)
    ),
}


@functools.cache
def gpt_state(num_stages, num_chunks, make="adam", seed=1, width=8):
    """A model, and a state of it in which moments are not zero."""
    config = GPTConfig(vocab_size=11, context=4, layers=8, width=width, heads=2)
    model = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs),
        stem="embedding",
        body="blocks",
        head="head",
        num_stages=num_stages,
        num_chunks=num_chunks,
        inputs=jnp.zeros((2, 4), int),
    )
    mesh = make_mesh(num_stages)
    state = init_train_state(lambda: model.init(nnx.Rngs(seed)), OPTIMIZERS[make](), mesh)

    def like_params(tree):
        """Of its structure, with the parameters' values."""
        return jax.tree.map(lambda a, p: p * 2 + 1 if a.shape == p.shape else a, tree, state.params)

    if make == "adam":
        moments = state.opt_state[0]
        moments = moments._replace(mu=like_params(moments.mu), nu=like_params(moments.nu))
        state = state._replace(opt_state=(moments, *state.opt_state[1:]))
    return model, state


def taken(state):
    """What a snapshot holds: arrays, and what they stand for."""
    stored = {place.name: place for place in places(state)}
    leaves = jax.tree.leaves(state)
    arrays = {p.name: np.asarray(raw(a)) for p, a in zip(stored.values(), leaves, strict=True)}
    return stored, arrays


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(LAYOUTS, 2)))
def test_the_blocks_are_found_on_another_number_of_stages(before, after):
    model, state = gpt_state(*LAYOUTS[before], seed=1)
    other, template = gpt_state(*LAYOUTS[after], seed=2)
    restored, left = rebuild(template, *taken(state))
    assert left == []
    assert bits(other.to_plain(restored.params)) == bits(model.to_plain(state.params))
    for name in ("mu", "nu"):
        old, new = (getattr(s.opt_state[0], name) for s in (state, restored))
        assert bits(other.to_plain(new)) == bits(model.to_plain(old))
    for leaf, like in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
        assert leaf.sharding == like.sharding


def test_masked_optimizers_on_the_same_stages():
    _, state = gpt_state(4, 1, "masked", seed=1)
    _, template = gpt_state(4, 1, "masked", seed=2)
    restored, _ = rebuild(template, *taken(state))
    assert bits(restored) == bits(state)


def test_names_are_unique():
    for num_stages, num_chunks in LAYOUTS.values():
        _, state = gpt_state(num_stages, num_chunks)
        names = [place.name for place in places(state)]
        assert len(set(names)) == len(names)


def test_another_model_is_refused_by_name():
    _, state = gpt_state(4, 1)
    _, wider = gpt_state(4, 1, width=16)
    with pytest.raises(MismatchError, match=r"\.params\.\S+ is float32\[.* here and float32\["):
        rebuild(wider, *taken(state))


def test_another_optimizer_is_refused_by_name():
    _, state = gpt_state(4, 1)
    _, more = gpt_state(4, 1, "more")
    with pytest.raises(MismatchError, match=r"the snapshot has no \.opt_state"):
        rebuild(more, *taken(state))
    _, fewer = gpt_state(4, 1, "sgd")
    with pytest.raises(MismatchError, match=r"the snapshot has \.opt_state.*unknown here"):
        rebuild(fewer, *taken(state))
