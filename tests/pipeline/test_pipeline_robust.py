"""What users may do to a pipeline, and still get the numbers of one device."""

import dataclasses
import functools
import itertools
import subprocess
import sys
import textwrap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from parity import models
from parity.cases import assert_same, pipeline_numbers, reference_numbers

from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    batch_sharding,
    param_shardings,
    pipeline_value_and_grad,
    repeat_block,
)
from jpipe.reference import reference_value_and_grad
from jpipe.schedule import SCHEDULES, Schedule, check_schedule, make_schedule

P, M, SIZE, D = 4, 5, 4, 8  # stages, microbatches, examples of a microbatch, width
base = functools.cache(lambda: models.mlp(P, M, size=SIZE, width=D))


def model(*, stem=None, body=None, block=None, head=None, parts=None, **fields):
    """The MLP with other functions, other parts of its parameters, another loss or batch."""
    body = repeat_block(block) if block else body
    functions = {"stem": stem, "body": body, "head": head}
    functions = {name: f for name, f in functions.items() if f is not None}
    problem = base()._replace(**fields)
    return problem._replace(
        stages=dataclasses.replace(problem.stages, **functions),
        params=problem.params._replace(**(parts or {})),
    )


def assert_parity(problem, schedule="1f1b", **options):
    expected = reference_numbers(problem)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(expected))  # or the test is void
    assert_same(pipeline_numbers(problem, schedule, P), expected, **options)


def on_mesh(problem, mesh, *, lay_out):
    arguments = problem.params, problem.inputs, problem.targets
    if lay_out:
        shardings = param_shardings(mesh, problem.params), batch_sharding(mesh)
        arguments = jax.device_put(arguments, (*shardings, shardings[1]))
    return pipeline_value_and_grad(problem.stages, problem.loss, mesh)(*arguments)


# What lies in a bubble reaches nothing.


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


# What a block may contain.

KEY = 3  # of jax.random.key, made inside: nothing runs while tests are collected
TABLE = np.linspace(-1, 1, D, dtype=np.float32)
ORDER = np.array([1, 0, 3, 2, 7, 6, 4, 5])


@jax.custom_vjp
def doubled_gradient(x, w):
    return jnp.sin(x) @ w


doubled_gradient.defvjp(
    lambda x, w: (doubled_gradient(x, w), (jnp.cos(x), jnp.sin(x), w)),
    lambda kept, g: (2 * (g @ kept[2].T) * kept[0], kept[1].T @ g),
)


def convolution(p, x):
    kernel = p["w"][:3, :1, None]
    dims = ("NWC", "WIO", "NWC")
    y = jax.lax.conv_general_dilated(x[:, :, None], kernel, (1,), "SAME", dimension_numbers=dims)
    return x + y[:, :, 0] + p["b"]


def indexing(p, x):
    h = (x @ p["w"])[:, ORDER]
    h = h + jnp.take_along_axis(x, jnp.argsort(x, axis=-1), axis=-1) + jnp.sort(h, axis=-1)
    top, where = jax.lax.top_k(x, 3)
    h = h.at[jnp.arange(SIZE)[:, None], where].add(top)
    return h + jax.lax.dynamic_slice(x @ p["w"], (0, jnp.argmax(x[0]) % 4), (SIZE, 4)).sum()


def reductions(p, x):
    h = jnp.cumsum(x @ p["w"], axis=-1) * 0.1 + jnp.cumprod(jnp.tanh(x), axis=-1)
    h = jax.lax.associative_scan(jnp.add, h, axis=1) + jnp.max(x, axis=-1, keepdims=True)
    return h + jax.nn.logsumexp(x * p["b"], axis=-1, keepdims=True) + jax.nn.softmax(x)


def control_flow(p, x):
    x = jax.lax.cond(x.sum() > 0, lambda x: x @ p["w"], lambda x: x * p["b"] + jnp.sin(x), x)
    x = jax.lax.switch(jnp.argmax(x[0]) % 2, [lambda x: x + p["b"], jnp.sin], x)
    x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["w"]), x)
    x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ p["w"] + w), None), x, p["w"])
    stopped = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] / 2), (0, x))[1]
    return jax.lax.map(lambda row: jnp.tanh(row @ p["w"]), x) + jax.lax.stop_gradient(stopped)


def randomness(p, x):
    key = jax.random.key(KEY)
    noise = jax.random.normal(jax.random.fold_in(key, jnp.argmax(x)), x.shape)
    return x + jnp.where(jax.random.bernoulli(key, 0.7, x.shape), noise * jnp.tanh(x @ p["w"]), 0)


def activations(p, x):
    h = x @ p["w"]
    return jnp.where(h > 0, jax.nn.gelu(h), jax.nn.relu(x) + jax.nn.silu(h)) + jax.nn.softplus(x)


BLOCKS = {
    "convolution": convolution,
    "indexing": indexing,
    "reductions": reductions,
    "control flow": control_flow,
    "randomness": randomness,
    "activations": activations,
    "custom_vjp": lambda p, x: doubled_gradient(x, p["w"]) + p["b"],
    "jit in jit": lambda p, x: jax.jit(lambda x, w: x + jax.jit(jnp.tanh)(x @ w))(x, p["w"]),
    "vmap and einsum": lambda p, x: jax.vmap(lambda r: jnp.einsum("i,ij->j", r, p["w"]))(x),
    "linear solve": lambda p, x: jnp.linalg.solve(3 * jnp.eye(D) + 0.1 * p["w"], x.T).T,
    "constants": lambda p, x: x * TABLE + jnp.tanh(x @ p["w"] + jnp.asarray(TABLE)),
    "callback": lambda p, x: (
        x @ p["w"]
        + jax.lax.stop_gradient(
            jax.pure_callback(lambda a: 2 * np.asarray(a), x, jax.lax.stop_gradient(x))
        )
    ),
    "barrier": lambda p, x: jax.lax.optimization_barrier(jnp.tanh(x @ p["w"])),
    "nothing": lambda p, x: x,
    "no input": lambda p, x: jnp.zeros_like(x) + p["b"],
}


@pytest.mark.parametrize(
    ("name", "schedule"), list(zip(BLOCKS, itertools.cycle(SCHEDULES), strict=False))
)
def test_blocks(name, schedule):
    assert_parity(model(block=BLOCKS[name]), schedule)


@pytest.mark.parametrize("name", ["indexing", "control flow", "randomness", "custom_vjp"])
def test_blocks_computed_again(name):
    # prevent_cse=True, the default, puts barriers into the program.
    assert_parity(model(block=jax.checkpoint(BLOCKS[name])))


@pytest.mark.parametrize(
    "policy",
    [
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("h"),
    ],
    ids=["everything", "dots", "names"],
)
def test_checkpoint_policies(policy):
    def block(p, x):
        return x + jnp.tanh(checkpoint_name(jnp.sin(x @ p["w"]), "h") + p["b"])

    assert_parity(model(block=jax.checkpoint(block, policy=policy)))


def test_a_body_that_scans_over_its_blocks():
    def body(blocks, x):
        return jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"] + p["b"]), None), x, blocks)[0]

    eight = models.mlp(2 * P, M, size=SIZE, width=D)
    assert_parity(eight._replace(stages=dataclasses.replace(eight.stages, body=body)))


# What parameters, activations and batches may be.


class Weights(NamedTuple):
    w: object
    b: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: object
    b: object


def attribute_block(p, x):
    return x + jnp.tanh(x @ p.w + p.b)


def widen(p, x):
    return jnp.pad(x, ((0, 0), (0, D - x.shape[1])))


def keyed(p, i):
    noise = jax.vmap(lambda key: jax.random.normal(key, (D,)))(i["key"])
    return i["x"] @ p["w"] + noise


TREES = {
    "stem without parameters": lambda: model(stem=widen, parts={"stem": {}}),
    "head without parameters": lambda: model(head=lambda p, x: x[:, :3], parts={"head": None}),
    "neither has any": lambda: model(
        stem=widen, head=lambda p, x: x[:, :3], parts={"stem": (), "head": ()}
    ),
    "named tuple": lambda: model(block=attribute_block, parts={"body": Weights(**body())}),
    "dataclass": lambda: model(block=attribute_block, parts={"body": Registered(**body())}),
    "unused parameter": lambda: model(parts={"body": {**body(), "u": jnp.ones((P, 2))}}),
    "one parameter in two parts": lambda: model(
        head=lambda p, x: (x @ p["w"].T)[:, :3], parts={"head": base().params.stem}
    ),
    "scalar in the head": lambda: model(
        head=lambda p, x: x @ p["w"] * p["s"],
        parts={"head": {**base().params.head, "s": jnp.float32(2)}},
    ),
    "scalar beside the activation": lambda: model(
        stem=lambda p, x: {"x": x @ p["w"], "sum": jnp.float32(0)},
        block=lambda p, x: {"x": jnp.tanh(x["x"] @ p["w"]), "sum": x["sum"] + (x["x"] ** 2).mean()},
        head=lambda p, x: (x["x"] @ p["w"], x["sum"]),
        loss=lambda y, t: jnp.mean((y[0] - t) ** 2) + 0.1 * y[1],
    ),
    "no targets": lambda: model(targets=None, loss=lambda y, t: jnp.mean(y**2)),
    "loss that ignores the outputs": lambda: model(loss=lambda y, t: jnp.mean(t)),
    "uint8 inputs": lambda: model(
        stem=lambda p, x: (x.astype(jnp.float32) / 255) @ p["w"],
        inputs=(jnp.arange(M * SIZE * 5) % 256).reshape(M, SIZE, 5).astype(jnp.uint8),
    ),
    "integers and booleans": lambda: model(
        stem=lambda p, i: jnp.where(i["mask"][:, None], p["w"][i["token"]], 0),
        inputs={
            "token": (jnp.arange(M * SIZE) % 5).reshape(M, SIZE),
            "mask": (jnp.arange(M * SIZE) % 3 > 0).reshape(M, SIZE),
        },
    ),
    "random keys": lambda: model(
        stem=keyed,
        inputs={"x": base().inputs, "key": jax.random.split(jax.random.key(1), (M, SIZE))},
    ),
    "constants on devices": lambda: constants_on_devices(jnp.linspace(0.5, 1.5, D)),
}


def body():
    return base().params.body


def constants_on_devices(scale):
    return model(
        stem=lambda p, x: x @ p["w"] + scale,
        block=lambda p, x: jnp.tanh(x @ p["w"]) * scale,
        head=lambda p, x: (x * scale) @ p["w"],
        loss=lambda y, t: jnp.mean((y - t) ** 2 * scale[:3]),
    )


@pytest.mark.parametrize(
    ("name", "schedule"), list(zip(TREES, itertools.cycle(SCHEDULES), strict=False))
)
def test_trees_and_dtypes(name, schedule):
    assert_parity(TREES[name](), schedule)


def test_parameters_may_be_any_triple():
    problem = base()
    run = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(P))
    triple = tuple(jax.tree.map(np.asarray, problem.params))
    actual = run(triple, np.asarray(problem.inputs), np.asarray(problem.targets))
    assert_same(actual, reference_numbers(problem))


def test_functions_may_be_partial_or_methods():
    class Model:
        def stem(self, p, x):
            return x @ p["w"]

    def block(scale, p, x):
        return x + scale * jnp.tanh(x @ p["w"] + p["b"])

    assert_parity(model(stem=Model().stem, block=functools.partial(block, 0.5)))


def test_float16():
    problem = models.mlp(P, M, dtype=jnp.float16)
    assert_parity(problem, tolerance=2e-3)


def test_float64():
    # jax_enable_x64 holds for a whole process.
    code = """
    import jax, numpy as np
    from jpipe.mesh import simulate_devices
    simulate_devices(8)
    jax.config.update("jax_enable_x64", True)
    from parity import models
    from parity.cases import assert_same, pipeline_numbers, reference_numbers
    problem = models.mlp(4, 5, dtype=np.float64)
    expected = reference_numbers(problem)
    assert all(g.dtype == np.float64 for g in jax.tree.leaves(expected[1]))
    assert_same(pipeline_numbers(problem, "1f1b", 4), expected, 1e-13)
    assert_same(pipeline_numbers(problem, "1f1b-overlap", 2, 2), expected, 1e-13)
    print("same")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == ["same"], run.stderr


def test_many_tiny_microbatches():
    problem = models.mlp(P, 300, size=1, width=2)
    for schedule in SCHEDULES:
        assert_same(pipeline_numbers(problem, schedule, P), reference_numbers(problem), 1e-5)


# Where it may run.


def test_mesh_with_the_stage_axis_only():
    mesh = Mesh(np.array(jax.devices()[:P]), ("stage",))
    for lay_out in (False, True):
        assert_same(on_mesh(base(), mesh, lay_out=lay_out), reference_numbers(base()))


def test_mesh_with_the_data_axis_first():
    mesh = Mesh(np.array(jax.devices()).reshape(2, P), ("data", "stage"))
    assert_same(on_mesh(base(), mesh, lay_out=True), reference_numbers(base()))


def test_arrays_that_lie_otherwise():
    mesh = make_mesh(P, 2)
    problem = models.mlp(P, 8, size=SIZE)

    def put(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    params = problem.params._replace(
        stem={"w": put(problem.params.stem["w"], None, "data")},
        body={"w": put(problem.params.body["w"]), "b": put(problem.params.body["b"], None, "data")},
    )
    run = pipeline_value_and_grad(problem.stages, problem.loss, mesh)
    actual = run(params, put(problem.inputs, "stage", "data"), put(problem.targets, "data"))
    assert_same(actual, reference_numbers(problem))


def test_gradients_lie_where_their_parameters_do():
    mesh = make_mesh(P, 2)
    _, grads = on_mesh(base(), mesh, lay_out=False)
    shardings = param_shardings(mesh, base().params)
    for g, sharding in zip(jax.tree.leaves(grads), jax.tree.leaves(shardings), strict=True):
        assert g.sharding.is_equivalent_to(sharding, g.ndim)


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_in_a_scan_in_a_jit():
    problem = base()

    def steps(value_and_grad):
        def step(params, _):
            loss, grads = value_and_grad(params, problem.inputs, problem.targets)
            return descend(params, grads), loss

        params, losses = jax.jit(lambda p: jax.lax.scan(step, p, length=4))(problem.params)
        return losses, params

    piped = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(P))
    plain = reference_value_and_grad(problem.stages, problem.loss)
    assert_same(steps(piped), steps(plain))


def test_closures_over_values_of_an_outer_jit():
    # A dropout key of each step, for one.
    def build(make, scale, key):
        def block(p, x):
            mask = jax.random.bernoulli(key, 0.7, x.shape)
            return x + jnp.tanh(x @ p["w"] + p["b"]) * mask * scale

        problem = model(stem=lambda p, x: x @ p["w"] * scale, block=block)
        return make(problem.stages, problem.loss)(problem.params, problem.inputs, problem.targets)

    def piped(stages, loss):
        return pipeline_value_and_grad(stages, loss, make_mesh(P))

    arguments = jnp.float32(1.5), jax.random.key(7)
    actual = jax.jit(functools.partial(build, piped))(*arguments)
    assert_same(actual, jax.jit(functools.partial(build, reference_value_and_grad))(*arguments))


def test_donated_parameters():
    problem, mesh = base(), make_mesh(P)
    value_and_grad = pipeline_value_and_grad(problem.stages, problem.loss, mesh)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, inputs, targets):
        loss, grads = value_and_grad(params, inputs, targets)
        return loss, descend(params, grads)

    shardings = param_shardings(mesh, problem.params)
    params = jax.device_put(jax.tree.map(np.array, problem.params), shardings)
    actual = step(params, problem.inputs, problem.targets)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    loss, grads = reference_numbers(problem)
    assert_same(actual, (loss, descend(problem.params, grads)))


def test_compiled_ahead_of_time_and_vmapped():
    problem = base()
    run = pipeline_value_and_grad(problem.stages, problem.loss, make_mesh(P))
    arguments = problem.params, problem.inputs, problem.targets
    expected = reference_numbers(problem)
    assert_same(run.lower(*arguments).compile()(*arguments), expected)
    both = jax.vmap(lambda x: run(problem.params, x, problem.targets))(
        jnp.stack([problem.inputs, 2 * problem.inputs])
    )
    assert_same(jax.tree.map(lambda a: a[0], both), expected)


def test_a_table_of_ones_own():
    # GPipe for the first two microbatches, then 1F1B for three: routes without a period.
    first, second = make_schedule("gpipe", P, 2), make_schedule("1f1b", P, 3)
    later = np.where(second.microbatch >= 0, second.microbatch + 2, -1)
    table = Schedule(
        name="mixed",
        num_stages=P,
        num_microbatches=5,
        op=np.concatenate([first.op, second.op]),
        microbatch=np.concatenate([first.microbatch, later]),
        chunk=np.concatenate([first.chunk, second.chunk]),
        hop=1,
        routes=first.routes + second.routes,
        route=np.concatenate([first.route, second.route + len(first.routes)]),
    )
    check_schedule(table)
    assert_parity(base(), table)
