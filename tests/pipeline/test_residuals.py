"""The split gradient is that of `jax.vjp`, and keeps less."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Var
from pipeline.simple_split import split_gradient

T, D = 6, 8  # tokens, width
POLICIES = jax.checkpoint_policies


def arguments(dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "w": jax.random.normal(keys[0], (D, D), dtype) * D**-0.5,
        "v": jax.random.normal(keys[1], (D, D), dtype) * D**-0.5,
        "b": jax.random.normal(keys[2], (D,), dtype),
    }
    return params, jax.random.normal(keys[3], (T, D), dtype)


@jax.custom_vjp
def scaled_sine(x, w):
    return jnp.sin(x) @ w


def _scaled_sine_forward(x, w):
    return scaled_sine(x, w), (jnp.cos(x), x, w)


def _scaled_sine_backward(residuals, g):
    cosine, x, w = residuals
    return 2 * (g @ w.T) * cosine, jnp.sin(
        x
    ).T @ g  # not the true gradient: 2 shows that it is ours


scaled_sine.defvjp(_scaled_sine_forward, _scaled_sine_backward)


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1)


@clipped.defjvp
def _clipped_jvp(primals, tangents):
    return clipped(*primals), 3 * tangents[0]


def norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def plain(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


def named(p, x):
    h = checkpoint_name(jnp.sin(x @ p["w"]), "h")
    return x + jnp.tanh(h + p["b"]) @ p["v"]


def scan_over(p, x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ p["v"] + w), None), x, p["w"])[0]


TABLE = np.linspace(0.5, 1.5, D, dtype=np.float32)
FUNCTIONS = {
    "plain": plain,
    "jit inside": lambda p, x: jax.jit(lambda x, w: x + jax.jit(jnp.tanh)(x @ w))(x, p["w"]),
    "custom_vjp": lambda p, x: x + scaled_sine(x * 2, p["w"]),
    "custom_jvp": lambda p, x: clipped(x @ p["w"]) + x,
    "relu": lambda p, x: jax.nn.relu(x @ p["w"]) @ p["v"],
    "gelu": lambda p, x: jax.nn.gelu(x @ p["w"]) @ p["v"],
    "exact gelu": lambda p, x: jax.nn.gelu(x @ p["w"], approximate=False) @ p["v"],
    "softmax": lambda p, x: jax.nn.softmax(x @ p["w"] @ x.T) @ x,
    "logsumexp": lambda p, x: x * jax.nn.logsumexp(x @ p["w"], axis=-1, keepdims=True),
    "norm": lambda p, x: norm(x) * p["b"] + norm(x @ p["w"]),
    "scan": scan_over,
    "scan of checkpoints": jax.checkpoint(scan_over),
    "cond": lambda p, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ p["w"], lambda: jnp.sin(x) * p["b"]),
    "while": lambda p, x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x @ p["w"]), x),
    "vmap": lambda p, x: jax.vmap(lambda row: jnp.sin(row @ p["w"]) * row)(x),
    "booleans": lambda p, x: jnp.where(x @ p["w"] > 0, x, x * p["b"]),
    "integers": lambda p, x: jnp.take_along_axis(x @ p["w"], jnp.argsort(x, axis=-1), axis=-1),
    "top_k": lambda p, x: jax.lax.top_k(x @ p["w"], 3)[0] @ p["v"][:3],
    "gather": lambda p, x: p["w"][jnp.argmax(x, axis=-1)] * x,
    "bf16 weights": lambda p, x: x + jnp.sin(x @ p["w"].astype(jnp.bfloat16).astype(jnp.float32)),
    "constants": lambda p, x: jnp.sin(x * TABLE) @ p["w"] + jnp.asarray(TABLE),
    "random": lambda p, x: x @ p["w"] * jax.random.bernoulli(jax.random.key(1), 0.5, (T, D)),
    "stop_gradient": lambda p, x: jnp.sin(x @ p["w"]) * jax.lax.stop_gradient(jnp.cos(x)),
    "ignores x": lambda p, x: jnp.broadcast_to(p["b"], (T, D)),
    "ignores params": lambda p, x: jnp.sin(x) * x,
    "returns x": lambda p, x: x,
    "returns constants": lambda p, x: jnp.ones((T, D)),
    "returns x twice": lambda p, x: {"a": x, "b": (x, jnp.sin(x @ p["w"]))},
    "returns what it keeps": lambda p, x: (jnp.exp(x @ p["w"]), x),
    "unused output": lambda p, x: jax.jit(lambda a: (jnp.sin(a), jnp.cos(a)))(x @ p["w"])[0],
    "checkpoint": jax.checkpoint(plain),
    "checkpoint, CSE": jax.checkpoint(plain, prevent_cse=False),
    "nothing saveable": jax.checkpoint(plain, policy=POLICIES.nothing_saveable),
    "everything saveable": jax.checkpoint(plain, policy=POLICIES.everything_saveable),
    "dots saveable": jax.checkpoint(plain, policy=POLICIES.dots_saveable),
    "names saveable": jax.checkpoint(named, policy=POLICIES.save_only_these_names("h")),
    "names not saveable": jax.checkpoint(
        named, policy=POLICIES.save_anything_except_these_names("h")
    ),
    "checkpoint twice": jax.checkpoint(lambda p, x: jax.checkpoint(plain)(p, plain(p, x))),
    "key from x": lambda p, x: jax.checkpoint(
        lambda x, key: jnp.sin(x * jax.random.normal(key, x.shape)) @ p["w"]
    )(x, jax.random.fold_in(jax.random.key(0), jnp.argmax(x))),
    "linear solve": lambda p, x: jnp.linalg.solve(p["w"] + 3 * jnp.eye(D), x.T).T,
    "checkpoint of a scan's body": lambda p, x: jax.lax.scan(
        jax.checkpoint(lambda c, w: (jnp.tanh(c @ p["v"] + w), None)), x, p["w"]
    )[0],
}


def by_vjp(function, params, x, dy):
    y, pullback = jax.vjp(function, params, x)
    return y, *pullback(dy)


def by_split(function, params, x, dy):
    split = split_gradient(function, params, x)
    y, kept = split.forward(params, x)
    assert [(k.shape, k.dtype) for k in kept] == [(k.shape, k.dtype) for k in split.kept]
    return y, *split.backward(params, kept, dy)


def cotangent(function, params, x):
    y = jax.eval_shape(function, params, x)
    leaves, tree = jax.tree.flatten(y)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    leaves = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
    return tree.unflatten(leaves)


def assert_equal_gradients(function, params, x, tolerance=1e-6):
    dy = cotangent(function, params, x)
    # In one program each, as in a pipeline.
    actual = jax.jit(functools.partial(by_split, function))(params, x, dy)
    expected = jax.jit(functools.partial(by_vjp, function))(params, x, dy)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(np.abs(b).max(), 1e-30)
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=tolerance)


def num_bytes(shapes):
    return sum(a.size * a.dtype.itemsize for a in shapes)


def depend_on_x(arrays_of, params, x):
    """Of the arrays that a function of (params, x) returns: for each, whether some x changes it."""
    run = jax.jit(arrays_of)
    runs = [run(params, x)] + [run(params, x[::-1] * scale) for scale in (-2.0, -0.3, 0.5, 3.0)]
    return [any(not np.array_equal(a, b) for b in others) for a, *others in zip(*runs, strict=True)]


def is_var(v):
    return isinstance(v, Var)


def bytes_that_vjp_keeps_of_x(function, params, x):
    """Size of the residuals of `jax.vjp` that are computed from x."""

    def residuals(p, x):
        return jax.tree.leaves(jax.vjp(function, p, x)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, x).jaxpr
    of_x = set(jaxpr.invars[len(jax.tree.leaves(params)) :])
    for eqn in jaxpr.eqns:
        if of_x.intersection(filter(is_var, eqn.invars)):
            of_x.update(eqn.outvars)
    return num_bytes(v.aval for v in of_x.intersection(filter(is_var, jaxpr.outvars)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_equal_vjp(name):
    assert_equal_gradients(FUNCTIONS[name], *arguments())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_keeps_no_more_than_vjp(name):
    params, x = arguments()
    kept = split_gradient(FUNCTIONS[name], params, x).kept
    assert num_bytes(kept) <= bytes_that_vjp_keeps_of_x(FUNCTIONS[name], params, x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_keeps_nothing_of_the_parameters(name):
    params, x = arguments()
    split = split_gradient(FUNCTIONS[name], params, x)
    varies = depend_on_x(lambda p, x: split.forward(p, x)[1], params, x)
    # What was decided about x may come out the same for every x tried.
    assert all(v or k.dtype == bool for v, k in zip(varies, split.kept, strict=True))


def test_the_test_sees_what_vjp_keeps():
    params, x = arguments()
    # x, the tanh and its derivative; not the weights.
    assert bytes_that_vjp_keeps_of_x(plain, params, x) == 3 * T * D * 4


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("checkpoint", [(T, D)]),
        ("checkpoint, CSE", [(T, D)]),
        ("nothing saveable", [(T, D)]),
        ("scan of checkpoints", [(T, D)]),
        ("names saveable", [(T, D), (T, D)]),
        ("dots saveable", [(T, D), (T, D)]),
        ("returns x", []),
        ("ignores x", []),
        ("returns constants", []),
    ],
)
def test_the_user_decides_what_is_kept(name, shapes):
    kept = split_gradient(FUNCTIONS[name], *arguments()).kept
    assert [k.shape for k in kept] == shapes


def test_with_checkpoint_only_the_input_itself_is_kept():
    params, x = arguments()
    _, kept = split_gradient(jax.checkpoint(plain), params, x).forward(params, x)
    np.testing.assert_array_equal(kept, [x])


def test_elementwise_chains_are_computed_again():
    def chain(p, x):
        h = x @ p["w"]
        return jnp.exp(jnp.sin(h) * jnp.tanh(h)) @ p["v"]

    params, x = arguments()
    kept = split_gradient(chain, params, x).kept
    assert [k.shape for k in kept] == [(T, D), (T, D)]  # x and h
    assert bytes_that_vjp_keeps_of_x(chain, params, x) >= 4 * T * D * 4


def test_a_mask_is_kept_as_booleans_or_not_at_all():
    def masked(p, x):
        return jnp.where(x @ p["w"] > 0, p["b"], 0.0) + 0 * x

    split = split_gradient(masked, *arguments())
    assert [(k.shape, k.dtype) for k in split.kept] == [((T, D), jnp.bool_)]


@pytest.mark.parametrize("weights", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("activations", [jnp.float32, jnp.bfloat16])
def test_mixed_dtypes(weights, activations):
    def mixed(p, x):
        h = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
        return x + jax.nn.gelu(h.astype(jnp.float32) + p["b"]).astype(x.dtype)

    params, _ = arguments(weights)
    _, x = arguments(activations)
    assert_equal_gradients(mixed, params, x, tolerance=2e-2)  # XLA may keep more than bfloat16
    kept = split_gradient(mixed, params, x).kept
    assert num_bytes(kept) <= 2 * T * D * 2  # x for the product and h, in bfloat16


def test_trees_of_any_kind():
    def function(p, x):
        (w, _), b = p
        return {"y": x["a"] @ w, "z": [jnp.sin(x["n"][0]) * b]}

    params, x = arguments()
    params = ((params["w"], None), params["b"])
    assert_equal_gradients(function, params, {"a": x, "n": (x[:, :1],)})
    assert_equal_gradients(lambda p, x: x @ p, jnp.eye(D), x)


def test_shapes_are_enough():
    params, x = arguments()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, x))
    split = split_gradient(plain, *shapes)
    _, kept = split.forward(params, x)
    expected = by_vjp(plain, params, x, x)
    for a, b in zip(
        jax.tree.leaves(split.backward(params, kept, x)), jax.tree.leaves(expected[1:]), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_backward_runs_on_any_microbatch():
    params, x = arguments()
    split = split_gradient(plain, params, x)
    inputs = [x, 2 * x, x - 1]
    kept = [split.forward(params, x)[1] for x in inputs]
    for x, k in reversed(list(zip(inputs, kept, strict=True))):
        _, expected = jax.vjp(plain, params, x)
        actual = split.backward(params, k, jnp.ones_like(x))
        for a, b in zip(
            jax.tree.leaves(actual), jax.tree.leaves(expected(jnp.ones_like(x))), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


UNARY = [
    jnp.sin,
    jnp.tanh,
    jax.nn.gelu,
    jax.nn.relu,
    jax.nn.softmax,
    norm,
    jax.jit(jnp.cos),
    jax.checkpoint(lambda a: jnp.sin(jnp.tanh(a))),
    lambda a: a[::-1],
    lambda a: a.T.reshape(a.shape),
    lambda a: jnp.cumsum(a, axis=0) / T,
    lambda a: jnp.sort(a, axis=-1),
    lambda a: a - a.max(axis=-1, keepdims=True),
    lambda a: a.mean(axis=0, keepdims=True) + jnp.zeros_like(a),
]
BINARY = [
    jnp.add,
    jnp.multiply,
    jnp.maximum,
    lambda a, b: jnp.where(a > b, a, jnp.sin(b)),
    lambda a, b: (a @ b.T) @ b / T,
]


@st.composite
def dags(draw):
    """Steps of a random program: (operation, indices of the values it reads)."""
    steps = []
    for k in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["unary", "binary", "matmul"]))
        operation = draw(st.sampled_from({"unary": UNARY, "binary": BINARY, "matmul": "wv"}[kind]))
        reads = [draw(st.integers(0, k)) for _ in range(2 if kind == "binary" else 1)]
        steps.append((operation, reads))
    return steps


@settings(max_examples=15, deadline=None)
@given(dags(), st.booleans())
def test_random_programs(steps, returns_all):
    def program(p, x):
        values = [x]
        for operation, reads in steps:
            read = [values[k] for k in reads]
            if isinstance(operation, str):
                values.append(read[0] @ p[operation] + p["b"])
            else:
                values.append(operation(*read))
        return values if returns_all else values[-1]

    params, x = arguments()
    assert_equal_gradients(program, params, x, tolerance=1e-5)
    kept = split_gradient(program, params, x).kept
    assert num_bytes(kept) <= bytes_that_vjp_keeps_of_x(program, params, x)
