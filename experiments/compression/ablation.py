"""Which error feedback a one-bit momentum needs, on a problem whose answer is known.

Linear regression: each of W workers has data of its own and its own best weights, and what is
wanted fits all data together. Momentum with one bit a number and both error feedbacks, one of
them, or none; and the gradient compressed instead of the momentum.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpipe.mesh import make_mesh
from jpipe.optim import Feedback, Method, Reduction

BOTH = Feedback()
WORKERS, FEATURES, ROWS, BATCH = 8, 512, 256, 16
SPREAD = 0.5  # of the sizes of the features, in powers of ten
STEPS, RATE, DECAY, BLOCK = 2000, 0.05, 0.9, 64
SEEDS = range(3)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What travels, and which errors are fed back.

    Attributes:
        name: of the row.
        method: how it travels.
        feedback: which errors are fed back.
        momentum: whether it is the momentum that travels, or the gradient.
    """

    name: str
    method: Method = "onebit"
    feedback: Feedback = BOTH
    momentum: bool = True


VARIANTS = [
    Variant("float32 momentum", "none"),
    *(
        Variant(
            f"one-bit {'momentum' if momentum else 'gradient'}, {told}", "onebit", fed, momentum
        )
        for momentum in (True, False)
        for told, fed in {
            "both feedbacks": BOTH,
            "without the servers'": Feedback(server=False),
            "without the workers'": Feedback(worker=False),
            "without any": Feedback(worker=False, server=False),
        }.items()
    ),
]


class Problem(NamedTuple):
    """Rows and targets of each worker, and the least possible loss over all of them."""

    x_WRF: jax.Array
    y_WR: jax.Array
    least: jax.Array


def make_problem(seed: int) -> Problem:
    """Features of different size; workers that disagree about the weights."""
    random = np.random.default_rng(seed)
    sizes_F = 10 ** random.uniform(-SPREAD, 0, FEATURES)
    x_WRF = random.normal(size=(WORKERS, ROWS, FEATURES)) * sizes_F
    weights_WF = random.normal(size=FEATURES) + random.normal(size=(WORKERS, FEATURES))
    y_WR = np.einsum("wrf,wf->wr", x_WRF, weights_WF) + random.normal(size=(WORKERS, ROWS))
    rows, targets = x_WRF.reshape(-1, FEATURES), y_WR.ravel()
    best = np.linalg.lstsq(rows, targets)[0]
    least = np.mean((rows @ best - targets) ** 2)
    return Problem(*(jnp.asarray(a, jnp.float32) for a in (x_WRF, y_WR, least)))


def loss(weights_F: jax.Array, x_RF: jax.Array, y_R: jax.Array) -> jax.Array:
    """Mean square error."""
    return jnp.mean((x_RF @ weights_F - y_R) ** 2)


def excess_losses(variant: Variant, mesh: Mesh, problem: Problem, key: jax.Array) -> np.ndarray:
    """Loss over all data beyond the least possible, by step."""
    reduction = Reduction(variant.method, mesh, block_size=BLOCK, feedback=variant.feedback)
    rows, targets = problem.x_WRF.reshape(-1, FEATURES), problem.y_WR.ravel()
    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))

    def step(carry: Any, inputs: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        weights_F, momentum_F, state = carry
        i, key = inputs
        chosen_WB = jax.random.randint(key, (WORKERS, BATCH), 0, ROWS)
        x_WBF = jnp.take_along_axis(problem.x_WRF, chosen_WB[..., None], 1)
        own_WF = gradients(weights_F, x_WBF, jnp.take_along_axis(problem.y_WR, chosen_WB, 1))
        if variant.momentum:
            own_WF = DECAY * momentum_F + (1 - DECAY) * own_WF
            momentum_F, state = reduction.mean(own_WF, state)
        else:
            mean_F, state = reduction.mean(own_WF, state)
            momentum_F = DECAY * momentum_F + (1 - DECAY) * mean_F
        weights_F = weights_F - RATE * (1 - i / STEPS) * momentum_F
        return (weights_F, momentum_F, state), loss(weights_F, rows, targets) - problem.least

    zeros = jnp.zeros(FEATURES)
    start = (zeros, zeros, reduction.init(zeros))
    inputs = (jnp.arange(STEPS), jax.random.split(key, STEPS))
    _, losses = jax.jit(lambda: jax.lax.scan(step, start, inputs))()
    return np.asarray(losses)


def run() -> dict[str, list[np.ndarray]]:
    """Excess losses by step, of each variant and seed."""
    mesh = make_mesh(1, WORKERS)
    problems = [make_problem(seed) for seed in SEEDS]
    return {
        variant.name: [
            excess_losses(variant, mesh, problem, jax.random.key(seed))
            for seed, problem in zip(SEEDS, problems, strict=True)
        ]
        for variant in VARIANTS
    }


def report(found: dict[str, list[np.ndarray]]) -> Iterator[str]:
    """The table, and what it says."""
    lines = [
        "| what travels | excess loss at the end | lowest and highest seed | over float32 |",
        "|---|---|---|---|",
    ]
    base = statistics.median(losses[-1] for losses in found[VARIANTS[0].name])
    for name, by_seed in found.items():
        ends = sorted(float(losses[-1]) for losses in by_seed)
        middle = statistics.median(ends)
        diverges = not middle < min(losses[0] for losses in by_seed)
        over = "diverges" if diverges else f"{middle / base:.2f}"
        lines.append(f"| {name} | {middle:.4g} | {ends[0]:.4g} to {ends[-1]:.4g} | {over} |")
    yield from [*lines, ""]
    by_name = {name: statistics.median(float(own[-1]) for own in found[name]) for name in found}
    for what in ("momentum", "gradient"):
        ends = {
            name.partition(", ")[2]: value / base
            for name, value in by_name.items()
            if name.startswith(f"one-bit {what}")
        }
        both = ends.pop("both feedbacks")
        yield (
            f"- One-bit {what}: {both:.2f} x the excess of float32 with both feedbacks, "
            f"{min(ends.values()):.2f} x or more without one of them."
        )
