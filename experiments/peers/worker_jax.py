"""Worker: one device, the pipelines written by hand, and every schedule of jpipe."""

import pathlib
import sys
from importlib import metadata
from typing import Any

import jax
import model_jax
import numpy as np
import one_device_jax
from autodiff_jax import SPECS, gpipe, shift
from jax.sharding import NamedSharding, PartitionSpec
from problem import STAGES, Problem, load_problem
from protocol import serve
from runner_jax import Compiled, Eager

from jpipe.mesh import make_mesh
from jpipe.pipeline import (
    Chunks,
    Params,
    Stages,
    batch_sharding,
    param_shardings,
    pipeline_value_and_grad,
    repeat_block,
)
from jpipe.schedule import SCHEDULES

BY_HAND = {"gpipe": gpipe, "shift": shift}
CHUNKS = {"interleaved": 2, "zero-bubble-v": 2}
"""Pieces of the model on a stage, for schedules that have several."""


def by_hand(
    kind: str, recompute: str, problem: Problem, params: Any, *batch: np.ndarray
) -> Compiled:
    """GPipe by autodiff, or vmap and shift."""
    mesh = make_mesh(STAGES)
    body = model_jax.repeat(model_jax.make_block(problem.heads))
    body = jax.checkpoint(body) if recompute == "stage" else body
    place = {part: NamedSharding(mesh, spec) for part, spec in SPECS.items()}
    laid_out = jax.device_put(params, place)
    arguments = (laid_out, *jax.device_put(batch, batch_sharding(mesh)))
    shardings = NamedSharding(mesh, PartitionSpec()), jax.tree.map(lambda a: a.sharding, laid_out)
    run = jax.jit(jax.value_and_grad(BY_HAND[kind](body, mesh)), out_shardings=shardings)
    return Compiled(run.lower(*arguments).compile(), arguments)


def jpipe(
    schedule: str, recompute: Any, problem: Problem, params: Any, *batch: np.ndarray
) -> Compiled:
    """One of jpipe's schedules."""
    mesh = make_mesh(STAGES)
    body = repeat_block(model_jax.make_block(problem.heads), recompute)
    params = Params(**params)
    if schedule in CHUNKS:
        count = CHUNKS[schedule]
        body = Chunks(*[body] * count)
        params = params._replace(body=Chunks(*pieces(params.body, count)))
    stages = Stages(model_jax.stem, body, model_jax.head)
    arguments = (
        jax.device_put(params, param_shardings(mesh, params)),
        *jax.device_put(batch, batch_sharding(mesh)),
    )
    run = pipeline_value_and_grad(stages, model_jax.next_token_loss, mesh, schedule)
    return Compiled(run.lower(*arguments).compile(), arguments)


def pieces(stacked: Any, count: int) -> list[Any]:
    """Stacked blocks cut into so many equal parts."""
    return [jax.tree.map(lambda a, k=k: np.split(a, count)[k], stacked) for k in range(count)]


def main() -> None:
    """Serve."""
    folder = pathlib.Path(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)

    def make(contender: str, problem: str, num_microbatches: int) -> Any:
        work = load_problem(folder, problem, num_microbatches)
        match contender.split("/"):
            case ["jax", "scan"]:
                return Compiled(*one_device_jax.scan(*work))
            case ["jax", "split"]:
                return Eager(one_device_jax.split(*work))
            case ["jax", kind, recompute]:
                return by_hand(kind, recompute, *work)
            case ["jpipe", schedule, recompute]:
                return jpipe(schedule, recompute, *work)
        raise ValueError(f"contender={contender!r} is unknown")

    contenders = ["jax/scan", "jax/split"]
    for family, kinds in (("jax", BY_HAND), ("jpipe", SCHEDULES)):
        contenders += [f"{family}/{kind}/{r}" for kind in kinds for r in ("none", "stage")]
    serve(contenders, {n: metadata.version(n) for n in ("jpipe", "jax", "jaxlib")}, make)


if __name__ == "__main__":
    main()
