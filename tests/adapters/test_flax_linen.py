"""flax.linen models in a pipeline."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from parity.cases import assert_same, place
from parity.models import Problem

from jpipe.adapters import pipeline_from_linen
from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    param_shardings,
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
)
from jpipe.reference import reference_value_and_grad
from jpipe.train_step import init_train_state, make_train_step


class Block(nn.Module):
    width: int = 8
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train: bool):
        y = nn.BatchNorm(not train, momentum=0.9, use_fast_variance=False)(x)
        y = nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(y)))
        return x + nn.Dropout(self.rate, deterministic=not train)(y)


class Language(nn.Module):
    """Tied embeddings, the way linen users write them."""

    layers: int = 4
    rate: float = 0.0

    def setup(self):
        self.embed = nn.Embed(11, 8)
        self.blocks = [Block(rate=self.rate) for _ in range(self.layers)]
        self.norm = nn.LayerNorm()

    def logits(self, x):
        return self.embed.attend(self.norm(x))

    def __call__(self, tokens, train: bool = True):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, train=train)
        return self.logits(x)


def loss(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def tokens(num_microbatches, size=16):
    drawn = np.random.default_rng(0).integers(0, 11, (num_microbatches, size, 7))
    return drawn[..., :-1], drawn[..., 1:]


def cut(model, **settings):
    return pipeline_from_linen(
        model,
        tokens(1)[0][0],
        stem="embed",
        body="blocks",
        head="logits",
        train={"train": True},
        evaluate={"train": False},
        **settings,
    )


@functools.cache
def plain_numbers(layers, num_microbatches):
    """Loss, gradients and statistics as a Flax user gets them, without jpipe."""
    model = Language(layers)
    inputs, targets = tokens(num_microbatches)
    variables = model.init(jax.random.key(0), inputs[0])
    stats = variables["batch_stats"]

    @jax.jit
    def one(params, stats, i, t):
        def of(params):
            logits, new = model.apply(
                {"params": params, "batch_stats": stats}, i, mutable=["batch_stats"]
            )
            return loss(logits, t), new["batch_stats"]

        return jax.value_and_grad(of, has_aux=True)(params)

    losses, grads = [], []
    for i, t in zip(inputs, targets, strict=True):
        (value, stats), grad = one(variables["params"], stats, i, t)
        losses.append(value)
        grads.append(grad)
    mean = jax.tree.map(lambda *g: sum(g) / num_microbatches, *grads)
    return variables, sum(losses) / num_microbatches, mean, stats


@pytest.mark.parametrize(
    ("layers", "mesh", "settings"),
    [
        (4, (1, 1), {}),
        (4, (4, 1), {}),
        (4, (2, 2), {"recompute": "stage"}),
        (5, (3, 1), {"num_stages": 3}),
        (5, (2, 2), {"num_stages": 2, "split_points": (1,), "recompute": "block"}),
    ],
)
def test_tied_batch_norm_model_has_the_numbers_of_plain_flax(layers, mesh, settings):
    variables, expected, expected_grads, expected_stats = plain_numbers(layers, 5)
    pipe = cut(Language(layers), **settings)
    params, state = pipe.from_plain(variables)
    assert "embed" not in params.head["params"]  # it is stored once
    mesh = make_mesh(*mesh)
    problem = Problem(pipe.stages, loss, params, *tokens(5))
    state = jax.device_put(state, param_shardings(mesh, state))
    run = pipeline_value_and_grad(pipe.stages, loss, mesh)
    value, grads, state = run(*place(problem, mesh), state)
    plain = jax.tree.map(jnp.asarray, pipe.to_plain(grads, state))
    assert_same((value, plain["params"]), (expected, expected_grads), 2e-6)
    assert_same((value, plain["batch_stats"]), (expected, expected_stats), 2e-6)


def test_initial_variables_are_those_of_the_model():
    pipe = cut(Language(5), num_stages=2)
    params, state = pipe.init(jax.random.key(3))
    plain = pipe.to_plain(params, state)
    back = pipe.from_plain(plain)
    assert jax.tree.structure(back) == jax.tree.structure((params, state))
    variables = Language(5).init(jax.random.key(3), tokens(1)[0][0])
    assert jax.tree.structure(plain) == jax.tree.structure(variables)
    assert jax.tree.map(jnp.shape, plain) == jax.tree.map(jnp.shape, variables)


def test_tied_weights_are_one_after_fifty_steps():
    pipe = cut(Language(4))
    mesh, optimizer = make_mesh(2), optax.adamw(1e-2)
    state = init_train_state(lambda: pipe.init(jax.random.key(0)), optimizer, mesh)
    step = make_train_step(pipe.stages, loss, optimizer, mesh)
    batch, losses = tokens(3, 4), []
    for _ in range(50):
        state, metrics = step(state, *batch)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.6 * losses[0]
    plain = pipe.to_plain(state.params, state.model_state)
    assert sorted(plain["params"]) == [
        "blocks_0",
        "blocks_1",
        "blocks_2",
        "blocks_3",
        "embed",
        "norm",
    ]
    logits = Language(4).apply(plain, batch[0][0], train=False)
    outputs = pipeline_predict(pipe.eval_stages, mesh)(state.params, batch[0], state.model_state)
    np.testing.assert_allclose(outputs[0], logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_dropout_does_not_depend_on_the_cut(num_stages):
    model = Language(6, rate=0.5)
    alone = cut(model)
    params, state = alone.init(jax.random.key(0))
    key = jax.random.key(5)
    expected = reference_value_and_grad(alone.stages, loss)(params, *tokens(4), state, key)
    points = {1: (), 2: (2,), 3: (1, 5)}[num_stages]
    pipe = cut(model, num_stages=num_stages, split_points=points)
    own = pipe.from_plain(alone.to_plain(params, state))
    run = pipeline_value_and_grad(pipe.stages, loss, make_mesh(num_stages))
    value, grads, _ = run(own[0], *tokens(4), own[1], key)
    actual, wanted = (
        jax.tree.map(jnp.asarray, p.to_plain(g)) for p, g in ((pipe, grads), (alone, expected[1]))
    )
    assert_same((value, actual), (expected[0], wanted), 2e-6)
    other = run(own[0], *tokens(4), own[1], jax.random.key(6))
    assert float(other[0]) != float(value)


def test_evaluation_uses_running_averages():
    pipe = cut(Language(4, rate=0.5))
    params, state = pipe.init(jax.random.key(0))
    batch = tokens(3)
    value = pipeline_evaluate(pipe.eval_stages, loss, make_mesh(2))(params, *batch, state)
    plain = pipe.to_plain(params, state)
    logits = [Language(4).apply(plain, i, train=False) for i in batch[0]]
    expected = np.mean([loss(y, t) for y, t in zip(logits, batch[1], strict=True)])
    assert float(value) == pytest.approx(float(expected), rel=1e-6)


def test_frozen_parameters_have_no_gradients_and_no_optimizer_state():
    pipe = cut(Language(4), trainable=lambda path: not path[0].startswith("blocks"))
    optimizer, mesh = optax.adam(1e-2), make_mesh(2)
    state = init_train_state(lambda: pipe.init(jax.random.key(0)), optimizer, mesh)
    assert not jax.tree.leaves(state.params.body)
    before = pipe.to_plain(state.params, state.model_state)["params"]
    step = make_train_step(pipe.stages, loss, optimizer, mesh)
    state, _ = step(state, *tokens(3))
    after = pipe.to_plain(state.params, state.model_state)["params"]
    for name in before:
        same = jax.tree.map(np.array_equal, before[name], after[name])
        assert all(jax.tree.leaves(same)) == name.startswith("blocks")


class Sequence(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(8), nn.Dense(8), nn.LayerNorm(), nn.Dense(6), nn.Dense(3)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_list_of_layers():
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    model = Sequence()
    pipe = pipeline_from_linen(model, x[0], body="layers", num_stages=2)
    variables = model.init(jax.random.key(0), x[0])
    params = pipe.from_plain(variables)
    outputs = pipeline_predict(pipe.stages, make_mesh(2))(params, x)
    expected = [model.apply(variables, i) for i in x]
    np.testing.assert_allclose(outputs, np.stack(expected), rtol=1e-5, atol=1e-6)


class Stray(nn.Module):
    def setup(self):
        self.stem, self.head, self.extra = nn.Dense(4), nn.Dense(2), nn.Dense(4)
        self.blocks = [nn.Dense(4), nn.Dense(4)]

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.extra(x))


class SharedBlock(nn.Module):
    def setup(self):
        self.stem, self.head = nn.Dense(4), nn.Dense(2)
        block = nn.Dense(4)
        self.blocks = [block, block]

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "parts", "words"),
    [
        (Stray(), {}, r"params\.extra\.(bias|kernel) is used by none of stem, blocks, head"),
        (Stray(), {"stem": "stern"}, "stem='stern': Stray has no such attribute"),
        (Stray(), {"body": "stem"}, "body='stem' must be a list"),
        (Language(2), {"stem": "embed", "head": "logits", "num_stages": 3}, "cannot be cut into 3"),
        (SharedBlock(), {}, "same variable; only stem and head"),
    ],
)
def test_models_that_do_not_fit_are_refused(model, parts, words):
    names = {"stem": "stem", "body": "blocks", "head": "head", **parts}
    inputs = tokens(1)[0][0] if isinstance(model, Language) else np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=words):
        pipeline_from_linen(model, inputs, train={"train": True}, **names)


def test_variables_of_another_model_are_refused():
    pipe = cut(Language(4))
    variables = Language(4).init(jax.random.key(0), tokens(1)[0][0])
    deeper = Language(5).init(jax.random.key(0), tokens(1)[0][0])
    with pytest.raises(ValueError, match=r"no variable (params|batch_stats)\.blocks_4"):
        pipe.from_plain(deeper)
    variables["params"]["embed"]["embedding"] = np.zeros((12, 8))
    with pytest.raises(ValueError, match=r"params\.embed\.embedding has shape \(12, 8\)"):
        pipe.from_plain(variables)
    del variables["params"]["embed"]
    with pytest.raises(ValueError, match=r"lack params\.embed\.embedding"):
        pipe.from_plain(variables)


def test_functions_among_the_layers():
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(8), nn.tanh, nn.Dense(3)])
    pipe = pipeline_from_linen(model, x[0], body="layers", num_stages=2, split_points=[2])
    variables = model.init(jax.random.key(0), x[0])
    outputs = pipeline_predict(pipe.stages, make_mesh(2))(pipe.from_plain(variables), x)
    np.testing.assert_allclose(outputs, model.apply(variables, x), rtol=1e-5, atol=1e-6)


class Positions(nn.Module):
    """Declares a parameter of its own, beside its parts."""

    def setup(self):
        self.pos = self.param("pos", nn.initializers.normal(), (7, 8))
        self.embed = nn.Embed(11, 8)
        self.blocks = [nn.Dense(8), nn.Dense(8)]
        self.head = nn.Dense(3)

    def stem(self, tokens):
        return self.embed(tokens) + self.pos

    def __call__(self, tokens):
        x = self.stem(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_parameters_of_the_model_itself():
    model, x = Positions(), np.random.default_rng(0).integers(0, 11, (3, 4, 7))
    pipe = pipeline_from_linen(model, x[0], stem="stem", body="blocks", head="head")
    variables = model.init(jax.random.key(0), x[0])
    outputs = pipeline_predict(pipe.stages, make_mesh(2))(pipe.from_plain(variables), x)
    np.testing.assert_allclose(outputs, model.apply(variables, x), rtol=1e-5, atol=1e-6)


def test_dropout_without_a_key_is_refused():
    pipe = cut(Language(4, rate=0.5))
    params, state = pipe.init(jax.random.key(0))
    run = pipeline_value_and_grad(pipe.stages, loss, make_mesh(2))
    with pytest.raises(ValueError, match=r"draws random numbers.*pass key="):
        run(params, *tokens(2), state)
