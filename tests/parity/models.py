"""Small models of different kinds, each as stages, parameters and a batch."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpipe.pipeline import Params, PerStage, Stages, repeat_block


class Problem(NamedTuple):
    stages: Stages
    loss: Callable
    params: Params
    inputs: object
    targets: object


def normal(key, *shape, dtype=jnp.float32):
    return (
        jax.random.normal(key, shape) * shape[-2] ** -0.5
        if len(shape) > 1
        else jax.random.normal(key, shape)
    ).astype(dtype)


def mlp(
    num_blocks, num_microbatches, *, size=4, width=8, recompute="none", seed=0, dtype=jnp.float32
):
    """Residual tanh layers between two linear maps, mean squared error."""
    keys = jax.random.split(jax.random.key(seed), 6)
    params = Params(
        stem={"w": normal(keys[0], 5, width, dtype=dtype)},
        body={
            "w": normal(keys[1], num_blocks, width, width, dtype=dtype),
            "b": jnp.zeros((num_blocks, width), dtype),
        },
        head={"w": normal(keys[2], width, 3, dtype=dtype), "b": normal(keys[3], 3, dtype=dtype)},
    )
    stages = Stages(
        stem=lambda p, x: x.astype(dtype) @ p["w"],
        body=repeat_block(lambda p, x: x + jnp.tanh(x @ p["w"] + p["b"]), recompute),
        head=lambda p, x: x @ p["w"] + p["b"],
    )
    inputs = jax.random.normal(keys[4], (num_microbatches, size, 5))
    targets = jax.random.normal(keys[5], (num_microbatches, size, 3))
    return Problem(stages, lambda y, t: jnp.mean((y - t) ** 2), params, inputs, targets)


def deciding(num_blocks, num_microbatches, kind, *, size=8, width=64):
    """Blocks whose gradient hangs on comparisons: the place of a maximum, the k largest."""
    keys = jax.random.split(jax.random.key(2), 6)
    weights = (num_blocks, width, width)
    params = Params(
        stem=normal(keys[0], 5, width),
        body={
            "w": normal(keys[1], *weights),
            "w2": normal(keys[2], *weights),
            "b": normal(keys[3], num_blocks, width),
        },
        head=normal(keys[4], width, 1),
    )

    def maximum(p, x):
        t = (x @ p["w"]) * 0.37
        return x + jnp.tanh(t @ p["w2"] + jnp.max(t + p["b"], axis=-1, keepdims=True))

    def top(p, x):
        u = (x @ p["w"]) * 0.37 + p["b"]
        kept = jnp.where(u >= jax.lax.top_k(u, 8)[0][..., -1:], u, 0)
        return x + jnp.tanh(kept @ p["w2"])

    def rounding(p, x):
        u = (x @ p["w"]) * 0.37 + p["b"]
        return x + jnp.tanh((u - jnp.floor(u)) @ p["w2"]) * jnp.sign(u) * (u > 0).astype(int)

    block = {"maximum": maximum, "top": top, "rounding": rounding}[kind]
    stages = Stages(
        stem=lambda p, x: x @ p, body=repeat_block(block), head=lambda p, x: (x @ p)[..., 0]
    )
    inputs = jax.random.normal(keys[5], (num_microbatches, size, 5))
    return Problem(
        stages, lambda y, t: jnp.mean((y - t) ** 2), params, inputs, jnp.sin(inputs.sum(-1))
    )


def two_streams(num_blocks, num_microbatches, *, size=4, narrow=jnp.float32):
    """The boundary is a pytree of two arrays of different shape (and dtype); so is the batch."""
    keys = jax.random.split(jax.random.key(1), 6)
    params = Params(
        stem=(normal(keys[0], 5, 8), normal(keys[1], 5, 2)),
        body={"a": normal(keys[2], num_blocks, 8, 8), "c": normal(keys[3], num_blocks, 2, 8)},
        head=normal(keys[4], 8, 1),
    )

    def block(p, x):
        wide = x["wide"] + jax.nn.gelu(x["wide"] @ p["a"]) * jnp.exp(
            -jax.nn.relu(x["narrow"].astype(jnp.float32) @ p["c"])
        )
        return {"wide": wide, "narrow": jnp.sin(x["narrow"])}

    stages = Stages(
        stem=lambda p, i: {"wide": i["x"] @ p[0], "narrow": (i["x"] @ p[1]).astype(narrow)},
        body=repeat_block(block),
        head=lambda p, x: (x["wide"] @ p)[..., 0],
    )
    x = jax.random.normal(keys[5], (num_microbatches, size, 5))
    inputs = {"x": x}
    targets = {"y": jnp.sin(x.sum(-1)), "scale": jnp.ones((num_microbatches, size))}
    return Problem(
        stages,
        lambda y, t: jnp.mean(t["scale"] * jnp.abs(y - t["y"]) ** 1.5),
        params,
        inputs,
        targets,
    )


def uneven(widths, num_microbatches, *, size=4):
    """Stages of different depth, parameter trees and widths; `widths` at each boundary."""
    num_stages = len(widths) - 1
    keys = jax.random.split(jax.random.key(0), num_stages + 4)

    def parameters(stage):
        sizes = [widths[stage]] + [widths[stage + 1]] * (stage % 3 + 1)
        draw = jax.random.split(keys[stage], len(sizes))
        weights = [
            normal(k, *pair) for k, pair in zip(draw, itertools.pairwise(sizes), strict=False)
        ]
        return {"w": weights, "scale": jnp.float32(1.5)} if stage % 2 else tuple(weights)

    def plain(p, x):
        for w in p:
            x = jnp.tanh(x @ w)
        return x

    def scaled(p, x):
        return plain(p["w"], x) * p["scale"] + jnp.sin(x).sum(-1, keepdims=True)

    return Problem(
        Stages(
            stem=lambda p, x: x @ p,
            body=PerStage(*(scaled if s % 2 else plain for s in range(num_stages))),
            head=lambda p, x: x @ p,
        ),
        lambda y, t: jnp.mean((y - t) ** 2),
        Params(
            stem=normal(keys[-4], 5, widths[0]),
            body=PerStage(*map(parameters, range(num_stages))),
            head=normal(keys[-3], widths[-1], 3),
        ),
        jax.random.normal(keys[-2], (num_microbatches, size, 5)),
        jax.random.normal(keys[-1], (num_microbatches, size, 3)),
    )


class Carried(NamedTuple):
    problem: Problem
    state: Params
    key: jax.Array


def carrying(
    num_blocks, num_microbatches, *, stages=None, size=4, width=8, recompute="none", rate=0.3
):
    """Batch norm, dropout, a frozen weight, a count, and outputs that depend on what moved before.

    The blocks are stacked, or with `stages` cut into so many stages that differ.
    """
    draw = iter(jax.random.split(jax.random.key(3), 8))

    def drop(key, x):
        return x * jax.random.bernoulli(key, 1 - rate, x.shape) / (1 - rate)

    def norm(state, x):
        mean, var = x.mean(0), x.var(0)
        moved = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
        return (x - mean) * jax.lax.rsqrt(var + 1e-5), moved

    def stem(p, s, x, key):
        k1, k2 = jax.random.split(key)
        y, moved = norm(s["norm"], drop(k1, x @ p["w"]))
        y = y + 0.1 * s["norm"]["mean"]  # what has moved since must not reach the backward
        return drop(k2, jnp.tanh(y * p["b"])), {"norm": moved, "frozen": None}

    def block(p, s, x, key):
        y, moved = norm(s["norm"], x @ p["w"])
        y = drop(key, jnp.tanh(y * jnp.cos(s["norm"]["mean"]))) @ s["frozen"]
        return x + y, {"norm": moved, "frozen": None}

    def head(p, s, x, key):
        return drop(key, x) @ p + 0.01 * s["count"], {"count": s["count"] + 1}

    def fresh(*shape):
        return {"mean": jnp.zeros((*shape, width)), "var": jnp.ones((*shape, width))}

    weights = {"w": normal(next(draw), num_blocks, width, width)}
    states = {"norm": fresh(num_blocks), "frozen": normal(next(draw), num_blocks, width, width)}
    params = Params(
        {"w": normal(next(draw), 5, width), "b": jnp.full(width, 1.1)},
        weights,
        normal(next(draw), width, 3),
    )
    state = Params(
        {"norm": fresh(), "frozen": jnp.ones(3)}, states, {"count": jnp.zeros((), jnp.int32)}
    )
    body = repeat_block(block, recompute, stateful=True)
    if stages is not None:
        cuts = [num_blocks * s // stages for s in range(stages + 1)]
        ranges = list(itertools.starmap(range, itertools.pairwise(cuts)))

        def pick(tree, k):
            return jax.tree.map(lambda a: a[k], tree)

        def run(which):
            def run(p, s, x, key):
                updates = {}
                for k in which:
                    own = None if key is None else jax.random.fold_in(key, k)
                    x, updates[k] = block(p[k], s[k], x, own)
                return x, updates

            return jax.checkpoint(run, prevent_cse=False) if recompute == "stage" else run

        params, state = (
            tree._replace(body=PerStage(*({k: pick(tree.body, k) for k in r} for r in ranges)))
            for tree in (params, state)
        )
        body = PerStage(*map(run, ranges))
    problem = Problem(
        Stages(stem, body, head, stateful=True),
        lambda y, t: jnp.mean((y - t) ** 2),
        params,
        jax.random.normal(next(draw), (num_microbatches, size, 5)),
        jax.random.normal(next(draw), (num_microbatches, size, 3)),
    )
    return Carried(problem, state, jax.random.key(7))
