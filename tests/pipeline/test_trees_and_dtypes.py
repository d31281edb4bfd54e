"""What parameters, activations and batches may be."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import printed
from parity import models
from parity.cases import assert_same, pipeline_numbers, reference_numbers
from pipeline.variants import SIZE, D, M, P, assert_parity, base, model

from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    pipeline_value_and_grad,
)
from jpipe.schedule import SCHEDULES


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
    assert printed(code) == ["same"]


def test_many_tiny_microbatches():
    problem = models.mlp(P, 300, size=1, width=2)
    for schedule in SCHEDULES:
        assert_same(pipeline_numbers(problem, schedule, P), reference_numbers(problem), 1e-5)
