"""What a flax.nnx model may hold: dropout, ties, frozen parameters, lists, skip connections."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adapters.images import digits
from flax import nnx
from parity.cases import assert_same

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import (
    GPT,
    GPTConfig,
    classification_loss,
    next_token_loss,
)
from jpipe.pipeline import (
    pipeline_predict,
    pipeline_value_and_grad,
)
from jpipe.reference import reference_value_and_grad
from jpipe.train_step import init_train_state, make_reference_step, make_train_step


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.linear(x)))


class MLP(nnx.Module):
    def __init__(self, rngs, layers=4):
        self.stem = nnx.Linear(64, 16, rngs=rngs)
        self.blocks = nnx.List([Layer(rngs) for _ in range(layers)])
        self.head = nnx.Linear(16, 10, rngs=rngs)


PARTS = {"stem": "stem", "body": "blocks", "head": "head"}


def flat_digits():
    images, labels = digits(4, 8)
    return images.reshape(4, 8, 64), labels


def trained(mesh, schedule="1f1b", steps=3, **settings):
    """Losses and parameters of an MLP with dropout after some steps."""
    pipe = pipeline_from_nnx(MLP, **PARTS, **settings)
    optimizer = optax.adam(1e-2)
    state = init_train_state(lambda: pipe.init(nnx.Rngs(0)), optimizer, mesh, key=jax.random.key(3))
    step = make_train_step(pipe.stages, classification_loss, optimizer, mesh, schedule)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, *flat_digits())
        losses.append(float(metrics.loss))
    return losses, pipe.to_plain(state.params)


@pytest.mark.slow
def test_dropout_is_a_function_of_seed_step_layer_and_microbatch_alone():
    expected, params = trained(make_mesh(1))
    assert len(set(expected)) == 3
    cases = [
        (make_mesh(4), "1f1b-overlap", {}),
        (make_mesh(2), "gpipe", {"recompute": "block"}),
        (make_mesh(2, 4), "1f1b", {}),
        (make_mesh(3), "1f1b", {"num_stages": 3, "split_points": (1, 2)}),
    ]
    for mesh, schedule, settings in cases:
        losses, other = trained(mesh, schedule, **settings)
        np.testing.assert_allclose(losses, expected, rtol=2e-6)
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


def test_steps_and_microbatches_draw_anew():
    pipe = pipeline_from_nnx(MLP, **PARTS)
    params = pipe.init(nnx.Rngs(0))
    images, _ = flat_digits()
    same = np.broadcast_to(images[:1], (2, *images.shape[1:]))
    predict = pipeline_predict(pipe.stages, make_mesh(2))
    first, second = predict(params, same, key=jax.random.key(0))
    assert not np.array_equal(first, second)
    again = predict(params, same, key=jax.random.key(0))
    np.testing.assert_array_equal(first, again[0])
    assert not np.array_equal(first, predict(params, same, key=jax.random.key(1))[0])


def test_frozen_parameters_have_no_gradients_and_no_optimizer_state():
    class Frozen(nnx.Param):
        pass

    def make(rngs):
        model = MLP(rngs)
        for block in model.blocks:
            block.linear.kernel = Frozen(block.linear.kernel[...])
        return model

    pipe = pipeline_from_nnx(make, **PARTS, wrt=nnx.All(nnx.Param, nnx.Not(Frozen)))
    mesh, optimizer = make_mesh(2), optax.adam(1e-2)
    state = init_train_state(lambda: pipe.init(nnx.Rngs(0)), optimizer, mesh, key=jax.random.key(3))
    assert jax.tree.map(jnp.shape, state.params.body) == {"linear": {"bias": (4, 16)}}
    assert state.model_state.body["linear"]["kernel"].sharding.spec[0] == "stage"
    run = pipeline_value_and_grad(pipe.stages, classification_loss, mesh, has_aux=True)
    before = jax.tree.map(np.asarray, state.model_state)
    _, grads, _ = run(state.params, *flat_digits(), state.model_state, jax.random.key(0))
    reference = reference_value_and_grad(pipe.stages, classification_loss, has_aux=True)
    _, expected, _ = reference(state.params, *flat_digits(), before, jax.random.key(0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, expected
    )
    step = make_train_step(pipe.stages, classification_loss, optimizer, mesh)
    state, _ = step(state, *flat_digits())
    jax.tree.map(np.testing.assert_array_equal, state.model_state, before)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (2, 2)])
def test_tied_gpt_after_fifty_steps(mesh):
    config = GPTConfig(vocab_size=16, context=8, layers=4, width=16, heads=2, tied=True)
    pipe = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs), stem="embedding", body="blocks", head="head"
    )
    optimizer, mesh = optax.adamw(1e-2), make_mesh(*mesh)
    drawn = np.random.default_rng(0).integers(0, 16, (2, 4, 9))
    batch = drawn[..., :-1], drawn[..., 1:]
    state = init_train_state(lambda: pipe.init(nnx.Rngs(0)), optimizer, mesh)
    assert "token" not in state.params.head
    alone = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, state))
    step = make_train_step(pipe.stages, next_token_loss, optimizer, mesh)
    reference = make_reference_step(pipe.stages, next_token_loss, optimizer)
    for _ in range(50):
        state, metrics = step(state, *batch)
        alone, wanted = reference(alone, *batch)
        float(metrics.loss)
    assert float(metrics.loss) == pytest.approx(float(wanted.loss), rel=1e-3)
    plain = pipe.to_plain(state.params)
    assert set(plain["head"]) == {"norm"}
    tied = pipe.stages.tied(state.params)
    np.testing.assert_array_equal(
        tied.head["token"]["embedding"], plain["embedding"]["token"]["embedding"]
    )


def test_a_list_of_layers():
    class Sequence(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(
                [nnx.Linear(a, b, rngs=rngs) for a, b in [(64, 16), (16, 16), (16, 12), (12, 10)]]
            )

    images, _ = flat_digits()
    pipe = pipeline_from_nnx(Sequence, body="layers", num_stages=2, inputs=images[0])
    assert pipe.num_blocks == 2
    outputs = pipeline_predict(pipe.stages, make_mesh(2))(pipe.init(nnx.Rngs(0)), images)
    x = images
    for layer in Sequence(nnx.Rngs(0)).layers:
        x = layer(x)
    np.testing.assert_allclose(outputs, x, rtol=1e-5, atol=1e-6)


def test_skip_connections_travel_along_the_boundary():
    """A U: what the first layer makes is added again by the last."""

    class Down(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x):
            y = self.linear(x)
            return y, y

    class Middle(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, pair):
            x, skip = pair
            return nnx.relu(self.linear(x)), skip

    class Up(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, pair):
            return self.linear(pair[0] + pair[1])

    class U(nnx.Module):
        def __init__(self, rngs):
            self.stem, self.head = Down(rngs), Up(rngs)
            self.blocks = nnx.List([Middle(rngs) for _ in range(4)])

        def __call__(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    pipe, model = pipeline_from_nnx(U, **PARTS), U(nnx.Rngs(0))
    images, labels = flat_digits()
    run = pipeline_value_and_grad(pipe.stages, classification_loss, make_mesh(4), has_aux=True)
    (loss, _), grads = run(pipe.init(nnx.Rngs(0)), images, labels)

    def whole(model):
        return classification_loss(model(images.reshape(-1, 64)), labels.ravel()).total / 32

    expected, wanted = nnx.jit(nnx.value_and_grad(whole))(model)
    grads = jax.tree.map(jnp.asarray, pipe.to_plain(grads))
    assert_same((loss, grads), (expected, nnx.to_pure_dict(wanted)), 2e-6)


@pytest.mark.parametrize(
    ("wrt", "trained"),
    [
        (nnx.All(nnx.Param, nnx.Not(nnx.PathContains("stem"))), {"blocks", "head"}),
        (nnx.All(nnx.Param, nnx.PathContains("head")), {"head"}),
    ],
)
def test_paths_of_filters_begin_at_the_model(wrt, trained):
    pipe = pipeline_from_nnx(MLP, **PARTS, wrt=wrt)
    params, state = pipe.init(nnx.Rngs(0))
    assert set(pipe.to_plain(params)) == trained
    assert set(pipe.to_plain(params, state)) == {"stem", "blocks", "head"}


def test_functions_among_the_layers_are_refused():
    def make(rngs):
        return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.relu, nnx.Linear(4, 4, rngs=rngs))

    with pytest.raises(ValueError, match=r"layers\[1\] is a .*, not an nnx\.Module"):
        pipeline_from_nnx(make, body="layers")
