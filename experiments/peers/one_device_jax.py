"""One device: the two baselines of the JAX contenders."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import model_jax
import numpy as np
from problem import STAGES, Problem

Tree = Any
Step = Callable[[], tuple[jax.Array, Tree]]
"""`() -> (loss, gradients)`"""


def scan(problem: Problem, params: Tree, inputs: np.ndarray, targets: np.ndarray) -> Any:
    """Plain gradient accumulation: one program that scans over the microbatches.

    Returns:
        The compiled program and its arguments.
    """
    body = model_jax.repeat(model_jax.make_block(problem.heads))

    def loss_of(params: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = body(params["body"], model_jax.stem(params["stem"], tokens))
        return model_jax.next_token_loss(model_jax.head(params["head"], x), targets)

    def run(params: Tree, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, Tree]:
        def add(sums: Tree, batch: tuple[jax.Array, jax.Array]) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of)(params, *batch)), None

        start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(add, start, (inputs, targets))
        return jax.tree.map(lambda a: a / len(inputs), sums)

    arguments = jax.device_put((params, inputs, targets), jax.devices()[0])
    return jax.jit(run).lower(*arguments).compile(), arguments


def split(problem: Problem, params: Tree, inputs: np.ndarray, targets: np.ndarray) -> Step:
    """The stages one by one, each in programs of its own, called from Python.

    A stage's backward computes the stage again from its input. XLA on the CPU makes better code of
    such small programs than of one that holds everything, which is why this is a baseline as well.
    """
    body = model_jax.repeat(model_jax.make_block(problem.heads))
    first, last = 0, STAGES - 1

    def forward(s: int, params: Tree, x: jax.Array) -> jax.Array:
        if s == first:
            x = model_jax.stem(params["stem"], x)
        return body(params["body"], x)

    def backward(s: int, params: Tree, sums: Tree, x: jax.Array, dy: jax.Array) -> Any:
        """Of the last stage `dy` is the targets, and the loss is returned as well."""

        def run(params: Tree, x: jax.Array) -> jax.Array:
            y = forward(s, params, x)
            return model_jax.next_token_loss(model_jax.head(params["head"], y), dy)

        function = run if s == last else lambda params, x: forward(s, params, x)
        if s == first:
            y, pullback = jax.vjp(lambda params: function(params, x), params)
        else:
            y, pullback = jax.vjp(function, params, x)
        grads, *dx = pullback(jnp.ones(()) if s == last else dy)
        return jax.tree.map(jnp.add, sums, grads), dx, y if s == last else ()

    def own(s: int) -> Tree:
        count = problem.layers // STAGES
        mine = {"body": jax.tree.map(lambda a: a[s * count : (s + 1) * count], params["body"])}
        mine |= {"stem": params["stem"]} if s == first else {}
        return mine | ({"head": params["head"]} if s == last else {})

    here = jax.devices()[0]
    owned = jax.device_put([own(s) for s in range(STAGES)], here)
    batches = [jax.device_put(pair, here) for pair in zip(inputs, targets, strict=True)]
    run_forward = jax.jit(forward, static_argnums=0)
    run_backward = jax.jit(backward, static_argnums=0, donate_argnums=2)
    zeros = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))
    scaled = jax.jit(lambda tree: jax.tree.map(lambda a: a / len(batches), tree))

    def step() -> tuple[jax.Array, Tree]:
        sums, losses = [zeros(tree) for tree in owned], []
        for tokens, targets in batches:
            entering = [tokens]
            for s in range(last):
                entering.append(run_forward(s, owned[s], entering[s]))
            dy = targets
            for s in reversed(range(STAGES)):
                sums[s], dx, loss = run_backward(s, owned[s], sums[s], entering.pop(), dy)
                losses += [loss] if s == last else []
                dy = dx[0] if dx else None
        return sum(losses) / len(losses), scaled(sums)

    return step
