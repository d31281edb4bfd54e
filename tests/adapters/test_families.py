"""Whole model families in a pipeline: the numbers are those of a plain Flax loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from parity.cases import TOLERANCE, assert_same, place
from parity.models import Problem
from sklearn.datasets import load_digits

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import (
    GPT,
    GPTConfig,
    ResNet,
    ResNetConfig,
    ViT,
    ViTConfig,
    classification_loss,
    next_token_loss,
)
from jpipe.pipeline import (
    param_shardings,
    pipeline_evaluate,
    pipeline_predict,
    pipeline_value_and_grad,
)
from jpipe.reference import reference_value_and_grad
from jpipe.schedule import SCHEDULES
from jpipe.train_step import init_train_state, make_reference_step, make_train_step

RESNET = ResNetConfig(depth=18, width=4)
VIT = ViTConfig(layers=4, width=16, heads=2, dropout=0.2)


@functools.cache
def digits(num_microbatches, size, dtype=np.float32):
    """Real images and labels, in microbatches."""
    data = load_digits()
    count = num_microbatches * size
    images = (data.images[:count] / 16).astype(dtype)
    labels = data.target[:count].astype(np.int32)
    return images.reshape(-1, size, 8, 8, 1), labels.reshape(-1, size)


def resnet(num_stages, config=RESNET, **settings):
    return pipeline_from_nnx(
        lambda rngs: ResNet(config, rngs=rngs),
        stem="stem",
        body="blocks",
        head="head",
        num_stages=num_stages,
        inputs=digits(1, 8)[0][0],
        **settings,
    )


def double(tree):
    """Batch norms amplify how sums were rounded: in float64 a true difference would still show."""
    return jax.tree.map(lambda a: a.astype(np.float64), tree)


def plain_resnet(num_microbatches, size):
    """Loss, gradients and statistics of a plain Flax loop over the microbatches."""
    graph, variables = nnx.split(ResNet(RESNET, rngs=nnx.Rngs(0)))
    model = nnx.merge(graph, double(variables))

    @nnx.jit
    def one(model, images, labels):
        def of(model):
            return classification_loss(model(images), labels).total / labels.size

        return nnx.value_and_grad(of)(model)

    batch = digits(num_microbatches, size, np.float64)
    results = [one(model, i, t) for i, t in zip(*batch, strict=True)]
    grads = [nnx.to_pure_dict(g) for _, g in results]
    mean = jax.tree.map(lambda *g: sum(g) / len(g), *grads)
    stats = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    return sum(value for value, _ in results) / len(results), mean, stats


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_data", "recompute"),
    [
        pytest.param("1f1b", 4, 1, "none", marks=pytest.mark.slow),
        ("1f1b", 2, 2, "stage"),
        pytest.param("1f1b-overlap", 3, 1, "block", marks=pytest.mark.slow),
    ],
)
def test_resnet_on_real_images_has_the_numbers_of_plain_flax(
    schedule, num_stages, num_data, recompute
):
    pipe, mesh = resnet(num_stages, recompute=recompute), make_mesh(num_stages, num_data)
    run = pipeline_value_and_grad(pipe.stages, classification_loss, mesh, schedule, has_aux=True)
    with jax.enable_x64(True):
        params, state = double(pipe.init(nnx.Rngs(0)))
        batch = digits(3, 16, np.float64)
        problem = Problem(pipe.stages, classification_loss, params, *batch)
        state = jax.device_put(state, param_shardings(mesh, state))
        (loss, aux), grads, state = run(*place(problem, mesh), state)
        expected, expected_grads, expected_stats = plain_resnet(3, 16)
        grads, stats = (jax.tree.map(jnp.asarray, pipe.to_plain(t)) for t in (grads, state))
        assert_same((loss, grads), (expected, expected_grads), TOLERANCE["float64"])
        assert_same((loss, stats), (expected, expected_stats), TOLERANCE["float64"])
    assert 0 <= int(aux["right"]) <= 48


@pytest.mark.parametrize(
    "schedule",
    [s if s == "1f1b" else pytest.param(s, marks=pytest.mark.slow) for s in SCHEDULES],
)
def test_resnet_equals_one_device(schedule):
    pipe = resnet(4)
    params, state = pipe.init(nnx.Rngs(0))
    reference = reference_value_and_grad(pipe.stages, classification_loss, has_aux=True)
    expected = reference(params, *digits(3, 16), state)
    run = pipeline_value_and_grad(
        pipe.stages, classification_loss, make_mesh(4), schedule, has_aux=True
    )
    (loss, aux), grads, new = run(params, *digits(3, 16), state)
    assert_same((loss, grads), (expected[0][0], expected[1]), TOLERANCE["float32, batch norms"])
    assert_same((loss, new), (expected[0][0], expected[2]))
    assert int(aux["right"]) == int(expected[0][1]["right"])


def test_resnet_learns_and_evaluates_with_running_averages():
    pipe, mesh, optimizer = resnet(4), make_mesh(4), optax.sgd(0.05, momentum=0.9)
    images, labels = digits(4, 16)
    state = init_train_state(lambda: pipe.init(nnx.Rngs(0)), optimizer, mesh)
    step = make_train_step(pipe.stages, classification_loss, optimizer, mesh)
    evaluate = pipeline_evaluate(pipe.eval_stages, classification_loss, mesh, has_aux=True)
    first, _ = evaluate(state.params, images, labels, state.model_state)
    for _ in range(30):
        state, _ = step(state, images, labels)
    last, aux = evaluate(state.params, images, labels, state.model_state)
    assert float(last) < float(first) / 4
    assert int(aux["right"]) > 56
    model = ResNet(RESNET, rngs=nnx.Rngs(1))
    full = nnx.state(model)
    nnx.replace_by_pure_dict(full, pipe.to_plain(state.params, state.model_state))
    nnx.update(model, full)
    model.eval()
    outputs = pipeline_predict(pipe.eval_stages, mesh)(state.params, images, state.model_state)
    np.testing.assert_allclose(outputs[1], model(images[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_resnet_152_compiles_and_steps():
    pipe, mesh = resnet(4, ResNetConfig(depth=152, width=8)), make_mesh(4)
    assert len(pipe.split_points) == 3
    assert max(pipe.stage_flops) < 1.1 * min(pipe.stage_flops)
    optimizer = optax.sgd(0.05, momentum=0.9)
    state = init_train_state(lambda: pipe.init(nnx.Rngs(0)), optimizer, mesh)
    step = make_train_step(pipe.stages, classification_loss, optimizer, mesh)
    losses = []
    for _ in range(4):
        state, metrics = step(state, *digits(4, 8))
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0] / 2


def vit(**settings):
    return pipeline_from_nnx(
        lambda rngs: ViT(VIT, rngs=rngs), stem="patches", body="blocks", head="head", **settings
    )


@pytest.mark.parametrize(
    ("mesh", "recompute"), [((4, 1), "none"), ((4, 1), "stage"), ((2, 2), "none")]
)
def test_vit_with_dropout_equals_one_device(mesh, recompute):
    pipe = vit(recompute=recompute)
    params, key = pipe.init(nnx.Rngs(0)), jax.random.key(1)
    reference = reference_value_and_grad(pipe.stages, classification_loss, has_aux=True)
    (expected, _), grads = reference(params, *digits(3, 8), key=key)
    problem = Problem(pipe.stages, classification_loss, params, *digits(3, 8))
    mesh = make_mesh(*mesh)
    run = pipeline_value_and_grad(pipe.stages, classification_loss, mesh, has_aux=True)
    (loss, _), actual = run(*place(problem, mesh), key=key)
    assert_same((loss, actual), (expected, grads), 2e-6, floor=1e-3)


def test_vit_without_dropout_has_the_numbers_of_plain_flax():
    pipe = vit()
    params = pipe.init(nnx.Rngs(0))
    images, _ = digits(3, 8)
    outputs = pipeline_predict(pipe.eval_stages, make_mesh(4))(params, images)
    model = ViT(VIT, rngs=nnx.Rngs(0))
    model.eval()
    np.testing.assert_allclose(outputs[2], model(images[2]), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"patches draws random numbers.*pass key="):
        pipeline_predict(pipe.stages, make_mesh(4))(params, images)


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


def test_training_statistics_in_evaluation_are_of_the_whole_microbatch():
    losses = []
    for mesh in (make_mesh(2), make_mesh(2, 2)):
        pipe = resnet(2)
        params, state = pipe.init(nnx.Rngs(0))
        evaluate = pipeline_evaluate(pipe.stages, classification_loss, mesh, has_aux=True)
        losses.append(float(evaluate(params, *digits(2, 16), state)[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_functions_among_the_layers_are_refused():
    def make(rngs):
        return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.relu, nnx.Linear(4, 4, rngs=rngs))

    with pytest.raises(ValueError, match=r"layers\[1\] is a .*, not an nnx\.Module"):
        pipeline_from_nnx(make, body="layers")
