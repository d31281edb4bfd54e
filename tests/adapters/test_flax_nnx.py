import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity.cases import assert_same, pipeline_numbers
from parity.models import Problem

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import GPT, GPTConfig, next_token_loss
from jpipe.pipeline import param_shardings

CONFIG = GPTConfig(vocab_size=17, context=6, layers=4, width=8, heads=2)


def make_gpt(rngs):
    return GPT(CONFIG, rngs=rngs)


def gpt_pipeline(recompute="none"):
    return pipeline_from_nnx(
        make_gpt, stem="embedding", body="blocks", head="head", recompute=recompute
    )


def tokens(num_microbatches, size=2):
    shape = (num_microbatches, size, CONFIG.context + 1)
    drawn = np.random.default_rng(0).integers(0, CONFIG.vocab_size, shape)
    return drawn[..., :-1], drawn[..., 1:]


@functools.cache
def plain_numbers(num_microbatches):
    """Loss and gradients as a Flax user gets them, without jpipe."""
    model = make_gpt(nnx.Rngs(0))
    inputs, targets = tokens(num_microbatches)

    def loss(model):
        losses = [next_token_loss(model(i), t) for i, t in zip(inputs, targets, strict=True)]
        return sum(losses) / num_microbatches

    value, grads = nnx.jit(nnx.value_and_grad(loss))(model)
    return value, nnx.to_pure_dict(grads)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_data", "recompute"),
    [
        ("1f1b", 1, 1, "none"),
        ("1f1b", 4, 1, "none"),
        ("1f1b", 4, 1, "stage"),
        ("1f1b", 2, 2, "block"),
        ("1f1b-overlap", 4, 1, "none"),
        ("gpipe", 2, 2, "none"),
    ],
)
def test_gpt_has_the_numbers_of_plain_flax(schedule, num_stages, num_data, recompute):
    pipe = gpt_pipeline(recompute)
    problem = Problem(pipe.stages, next_token_loss, pipe.init(nnx.Rngs(0)), *tokens(5))
    loss, grads = pipeline_numbers(problem, schedule, num_stages, num_data)
    expected_loss, expected_grads = plain_numbers(5)
    # The keys of blocks are 0, 1, ... in both; the sums of the plain model are autodiff's own.
    grads = jax.tree.map(jnp.asarray, pipe.to_plain(grads))
    assert_same((loss, grads), (expected_loss, expected_grads), 2e-6)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_parameters_are_those_of_the_constructor_on_every_mesh(num_stages):
    pipe = gpt_pipeline()
    mesh = make_mesh(num_stages)
    init = jax.jit(lambda: pipe.init(nnx.Rngs(0)))
    params = jax.device_put(init(), param_shardings(mesh, jax.eval_shape(init)))
    plain = nnx.to_pure_dict(nnx.state(nnx.jit(make_gpt)(nnx.Rngs(0))))
    assert_equal_trees(pipe.to_plain(params), plain)


def test_plain_form_round_trip_loses_nothing():
    pipe = gpt_pipeline()
    params = pipe.init(nnx.Rngs(3))
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    back = pipe.from_plain(pipe.to_plain(params))
    assert_equal_trees(tuple(back), tuple(params))


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


class Parts(nnx.Module):
    def __init__(self, rngs, blocks, **others):
        self.stem = nnx.Linear(3, 4, rngs=rngs)
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(4, 2, rngs=rngs)
        for name, module in others.items():
            setattr(self, name, module)


def linear(rngs, width=4, **settings):
    return nnx.Linear(width, width, rngs=rngs, **settings)


BAD = {
    "missing": (lambda r: nnx.Linear(2, 2, rngs=r), ["stem='stem'", "Linear"]),
    "no blocks": (lambda r: Parts(r, []), ["body='blocks'", "at least one"]),
    "shapes": (lambda r: Parts(r, [linear(r), linear(r, 5)]), ["blocks[1]", "blocks[0]"]),
    "types": (
        lambda r: Parts(r, [linear(r), nnx.LayerNorm(4, rngs=r)]),
        ["blocks[1]", "LayerNorm"],
    ),
    "settings": (
        lambda r: Parts(r, [linear(r), linear(r, use_bias=False)]),
        ["blocks[1]", "num_stages"],
    ),
    "outside": (lambda r: Parts(r, [linear(r)], extra=linear(r)), ["extra.", "stem, blocks, head"]),
    "twice": (lambda r: Parts(r, [linear(r)] * 3), ["blocks[1].", "blocks[0].", "same variable"]),
}


@pytest.mark.parametrize("name", BAD)
def test_models_that_do_not_fit_are_refused(name):
    make_model, expected = BAD[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the message is checked below
        pipeline_from_nnx(make_model, stem="stem", body="blocks", head="head")
    for part in expected:
        assert part in str(caught.value)


def test_body_that_is_no_list_is_refused():
    with pytest.raises(ValueError, match=r"body='stem' must be an nnx\.List"):
        pipeline_from_nnx(lambda r: Parts(r, [linear(r)]), stem="blocks", body="stem", head="head")


def test_parameters_of_another_depth_are_refused():
    pipe = gpt_pipeline()
    plain = pipe.to_plain(pipe.init(nnx.Rngs(0)))
    del plain["blocks"][3]
    with pytest.raises(ValueError, match=r"lack blocks\.3\..*same model"):
        pipe.from_plain(plain)


class Bottleneck(nnx.Module):
    """A block that changes the width of what it passes on."""

    def __init__(self, before, after, rngs):
        self.inner = nnx.Linear(before, 2 * after, rngs=rngs)
        self.outer = nnx.Linear(2 * after, after, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.gelu(self.inner(x)))


class Funnel(nnx.Module):
    """Blocks of different kinds and widths."""

    def __init__(self, rngs):
        self.stem = nnx.Linear(5, 16, rngs=rngs)
        self.blocks = nnx.List(
            [
                Bottleneck(16, 12, rngs),
                nnx.LayerNorm(12, rngs=rngs),
                Bottleneck(12, 12, rngs),
                nnx.Linear(12, 6, use_bias=False, rngs=rngs),
                Bottleneck(6, 4, rngs),
            ]
        )
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def square(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


@pytest.mark.parametrize(
    ("num_stages", "split_points", "recompute"),
    [(2, None, "none"), (4, None, "block"), (3, (1, 4), "stage")],
)
def test_blocks_that_differ_have_the_numbers_of_plain_flax(num_stages, split_points, recompute):
    inputs = np.random.default_rng(0).normal(size=(4, 2, 5)).astype(np.float32)
    targets = np.random.default_rng(1).normal(size=(4, 2, 3)).astype(np.float32)
    pipe = pipeline_from_nnx(
        Funnel,
        stem="stem",
        body="blocks",
        head="head",
        recompute=recompute,
        num_stages=num_stages,
        split_points=split_points,
        inputs=inputs[0],
    )
    problem = Problem(pipe.stages, square, pipe.init(nnx.Rngs(0)), inputs, targets)
    loss, grads = pipeline_numbers(problem, "1f1b", num_stages)

    def whole(model):
        return square(model(inputs.reshape(-1, 5)), targets.reshape(-1, 3))

    expected, expected_grads = nnx.jit(nnx.value_and_grad(whole))(Funnel(nnx.Rngs(0)))
    grads = jax.tree.map(jnp.asarray, pipe.to_plain(grads))
    assert_same((loss, grads), (expected, nnx.to_pure_dict(expected_grads)), 2e-6)


@pytest.mark.parametrize("num_stages", [3, 4])
def test_layers_that_do_not_divide_are_all_there_once(num_stages):
    config = GPTConfig(vocab_size=17, context=6, layers=5, width=8, heads=2)
    pipe = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs),
        stem="embedding",
        body="blocks",
        head="head",
        num_stages=num_stages,
        inputs=tokens(1)[0][0],
    )
    params = pipe.init(nnx.Rngs(0))
    assert [k for own in params.body for k in own] == [0, 1, 2, 3, 4]
    assert max(len(own) for own in params.body) == 2
    plain = nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(0))))
    assert_equal_trees(pipe.to_plain(params), plain)
    assert_equal_trees(tuple(pipe.from_plain(plain)), tuple(params))
    problem = Problem(pipe.stages, next_token_loss, params, *tokens(3))
    stacked = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs), stem="embedding", body="blocks", head="head"
    )
    alone = Problem(stacked.stages, next_token_loss, stacked.init(nnx.Rngs(0)), *tokens(3))
    loss, grads = pipeline_numbers(problem, "1f1b", num_stages)
    expected, expected_grads = pipeline_numbers(alone, "1f1b", 1)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for a, b in zip(
        jax.tree.leaves(pipe.to_plain(grads)),
        jax.tree.leaves(stacked.to_plain(expected_grads)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


def test_cuts_that_do_not_fit_are_refused():
    parts = {"stem": "stem", "body": "blocks", "head": "head"}
    for cuts in [(1,), (2, 2), (3, 1), (0, 2), (2, 5)]:
        with pytest.raises(ValueError, match=r"split_points=.*2 rising numbers between 1 and 4"):
            pipeline_from_nnx(Funnel, **parts, num_stages=3, split_points=cuts)
    with pytest.raises(ValueError, match="5 layers cannot be cut into 6 stages"):
        pipeline_from_nnx(Funnel, **parts, num_stages=6, inputs=np.zeros((2, 5), np.float32))
    with pytest.raises(ValueError, match=r"split_points=\(2,\); give num_stages"):
        pipeline_from_nnx(make_gpt, stem="embedding", body="blocks", head="head", split_points=(2,))
    with pytest.raises(ValueError, match="recompute='blocks' is unknown"):
        pipeline_from_nnx(Funnel, **parts, num_stages=2, split_points=(2,), recompute="blocks")
    with pytest.raises(ValueError, match=r"inputs=None.*split_points"):
        pipeline_from_nnx(Funnel, **parts, num_stages=3)
