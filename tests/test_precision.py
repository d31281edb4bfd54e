"""Which dtype for what: in the policy, in a user's functions, in the models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import models
from parity.cases import TOLERANCE, WAYS, assert_same, place
from parity.models import Problem

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import (
    GPT,
    GPTConfig,
    ResNet,
    ResNetConfig,
    classification_loss,
    next_token_loss,
)
from jpipe.pipeline import pipeline_value_and_grad
from jpipe.precision import POLICIES, Policy, cast, computes_in
from jpipe.reference import reference_value_and_grad

HALVES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


def test_the_named_policies():
    for name, policy in POLICIES.items():
        assert policy.param == policy.output == policy.norm == policy.softmax == "float32"
        assert policy.compute == {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[name]


def test_a_function_declares_what_it_computes_in():
    seen = []

    @computes_in("float32")
    def function(x, tree, *, flag):
        seen.extend([x.dtype, tree["w"].dtype, tree["n"].dtype])
        return {"y": x + tree["w"], "n": tree["n"]} if flag else None

    half = jnp.ones(3, jnp.float16)
    y = function(half, {"w": half, "n": jnp.arange(3)}, flag=True)
    assert seen == [jnp.float32, jnp.float32, jnp.int32]
    assert y["y"].dtype == jnp.float16
    assert y["n"].dtype == jnp.int32
    assert function.__name__ == "function"


def test_results_are_of_the_narrowest_argument_or_as_declared():
    norm = computes_in("float32")(lambda scale, x: scale * x)
    assert norm(jnp.ones(2, jnp.float32), jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    fixed = computes_in("float32", result="float16")(lambda a: a)
    assert fixed(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float16
    none = computes_in("bfloat16")(lambda: jnp.ones(2))
    assert none().dtype == jnp.bfloat16


def test_a_policy_casts_all_but_what_is_declared():
    policy = POLICIES["fp16"]
    plain = policy.wrap(lambda p, x: p @ x)
    assert plain(jnp.ones((2, 2)), jnp.ones(2)).dtype == jnp.float16
    seen = []

    @computes_in("float32")
    def declared(x):
        seen.append(x.dtype)
        return x

    assert policy.wrap(declared) is declared
    policy.wrap(lambda p, x: declared(p @ x))(jnp.ones((2, 2)), jnp.ones(2))
    assert seen == [jnp.float32]


def test_half_precision_overflows_where_a_declared_function_does_not():
    def softmax(x):
        return jnp.exp(x) / jnp.exp(x).sum()

    scores = jnp.full(4, 12.0, jnp.float16)  # e^12 is beyond float16
    assert not np.isfinite(np.asarray(POLICIES["fp16"].wrap(softmax)(scores))).any()
    np.testing.assert_allclose(computes_in("float32")(softmax)(scores), 0.25)


def test_cast_leaves_everything_else_alone():
    key = jax.random.key(0)
    tree = {"x": jnp.ones(2), "n": jnp.arange(2), "key": key, "text": "a", "none": None}
    new = cast(tree, "float16")
    assert new["x"].dtype == jnp.float16
    assert new["n"] is tree["n"]
    assert new["key"] is key
    assert new["text"] == "a"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compute": "fp16"}, r"compute='fp16' is no floating-point dtype; use float32"),
        ({"norm": "int32"}, r"norm='int32' is no floating-point dtype"),
    ],
)
def test_refuses(settings, said):
    with pytest.raises(ValueError, match=said):
        Policy(**settings)


def dtypes_inside(function, *args):
    """What each operation of a program computes in, by its name."""
    found = {}

    def read(jaxpr):
        for equation in jaxpr.eqns:
            dtypes = {str(v.aval.dtype) for v in equation.outvars if hasattr(v.aval, "dtype")}
            found.setdefault(equation.primitive.name, set()).update(dtypes)
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    read(inner)

    read(jax.make_jaxpr(function)(*args).jaxpr)
    return found


@pytest.mark.parametrize("name", HALVES)
def test_a_gpt_multiplies_in_half_precision_and_divides_in_float32(name):
    config = GPTConfig(vocab_size=17, context=6, layers=2, width=16, heads=2, policy=POLICIES[name])
    graph, state = nnx.split(GPT(config, rngs=nnx.Rngs(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    found = dtypes_inside(
        lambda state, tokens: nnx.merge(graph, state)(tokens), state, jnp.zeros((2, 6), int)
    )
    assert found["exp"] == {"float32"}  # softmax
    assert found["rsqrt"] == {"float32"}  # norms
    assert found["tanh"] == {str(jnp.dtype(HALVES[name]))}  # GELU
    assert str(jnp.dtype(HALVES[name])) in found["dot_general"]
    logits = nnx.merge(graph, state)(jnp.zeros((2, 6), int))
    assert logits.dtype == jnp.float32


def gpt(policy):
    config = GPTConfig(vocab_size=17, context=6, layers=4, width=16, heads=2, policy=policy)
    model = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs), stem="embedding", body="blocks", head="head"
    )
    tokens = jax.random.randint(jax.random.key(1), (5, 4, 7), 0, 17)
    params = model.init(nnx.Rngs(0))
    return Problem(model.stages, next_token_loss, params, tokens[..., :-1], tokens[..., 1:])


@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize("name", HALVES)
def test_low_precision_equals_one_device(name, schedule):
    """With a loss scale, as for training."""
    problem, scale = gpt(POLICIES[name]), jnp.float32(2.0**10)
    mesh = make_mesh(4)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh, schedule)
    actual = run(*place(problem, mesh), loss_scale=scale)
    reference = reference_value_and_grad(problem.stages, problem.loss)
    expected = reference(*problem[2:], loss_scale=scale)
    dtype = str(jnp.dtype(HALVES[name]))
    assert_same(actual, expected, TOLERANCE[dtype], floor=1e-3)


@pytest.mark.parametrize("name", HALVES)
def test_low_precision_is_near_float32(name):
    """An error in a cast would be larger than rounding."""
    found = {}
    for policy in ("fp32", name):
        problem = gpt(POLICIES[policy])
        reference = reference_value_and_grad(problem.stages, problem.loss)
        found[policy] = reference(*problem[2:])
    assert_same(found[name], found["fp32"], 0.1, floor=0.1)


def test_activations_travel_in_the_dtype_they_are_computed_in():
    problem, mesh = gpt(POLICIES["fp16"]), make_mesh(4)
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh)
    text = run.lower(*place(problem, mesh)).as_text()
    travels = [line for line in text.splitlines() if "collective_permute" in line]
    assert travels
    assert all("xf16>" in line for line in travels)


def test_a_resnet_keeps_its_statistics_in_float32():
    config = ResNetConfig(depth=18, width=4, policy=POLICIES["fp16"])
    model = ResNet(config, rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
    logits = model(images)
    assert logits.dtype == jnp.float32
    assert {a.dtype for a in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    graph, state = nnx.split(model)
    found = dtypes_inside(lambda state, x: nnx.merge(graph, state)(x), state, images)
    assert found["conv_general_dilated"] == {"float16"}
    assert found["rsqrt"] == {"float32"}
    plain = ResNet(dataclasses.replace(config, policy=POLICIES["fp32"]), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(logits, plain(images), atol=0.05)
    assert np.isfinite(float(classification_loss(logits, jnp.zeros(4, int)).total))


@pytest.mark.parametrize("name", HALVES)
def test_users_functions_in_a_policy(name):
    """Stages without Flax: each function wrapped, the head declared to be float32."""
    base, policy = models.mlp(4, 5), POLICIES[name]
    stages = dataclasses.replace(
        base.stages,
        stem=policy.wrap(base.stages.stem),
        body=policy.wrap(base.stages.body),
        head=policy.wrap(computes_in("float32", result="float32")(base.stages.head)),
    )
    problem = base._replace(stages=stages)
    mesh = make_mesh(4)
    run = pipeline_value_and_grad(stages, problem.loss, mesh)
    reference = reference_value_and_grad(stages, problem.loss)
    dtype = str(jnp.dtype(HALVES[name]))
    assert_same(run(*place(problem, mesh)), reference(*problem[2:]), TOLERANCE[dtype])
