"""A step with compressed gradients against one without, on devices simulated on the CPU."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from targets import REPLICAS, STAGES, Problem

from jpipe.mesh import make_mesh
from jpipe.models import classification_loss
from jpipe.optim import compressed_all_reduce
from jpipe.pipeline import batch_sharding, param_specs, pipeline_value_and_grad
from jpipe.train_step import init_train_state


@dataclasses.dataclass(frozen=True)
class Times:
    """Median CPU seconds of all devices together: loss and gradients, and an update of each way."""

    gradients: float
    updates: dict[str, float]


def measure(problem: Problem, methods: Sequence[str], rounds: int) -> Times:
    """Time the two halves of a step: the gradients of each replica, and SGD after a reduction.

    There are no links: what is measured is the computing that compression adds. Gradients and
    update are a program each, so that the former compile once for all methods.
    """
    mesh = make_mesh(STAGES, REPLICAS)
    rng = np.random.default_rng(0)
    shape = problem.images(problem.num_microbatches, REPLICAS * problem.microbatch_size).shape
    images = rng.normal(size=shape).astype(np.float32)
    labels = rng.integers(problem.config.classes, size=shape[:2], dtype=np.int32)
    specs = param_specs(mesh, problem.params)
    optimizers = {
        m: optax.chain(compressed_all_reduce(m, mesh, specs), optax.sgd(0.01)) for m in methods
    }
    started = time.perf_counter()
    state, batch = jax.block_until_ready(
        (
            init_train_state(lambda: problem.pipe.init(nnx.Rngs(0)), optimizers[methods[0]], mesh),
            jax.device_put((images, labels), batch_sharding(mesh)),
        )
    )
    value_and_grad = pipeline_value_and_grad(
        problem.pipe.stages, classification_loss, mesh, has_aux=True, per_replica=True
    )
    arguments = state.params, *batch, state.model_state
    program = value_and_grad.lower(*arguments).compile()
    print(f"gradients on the CPU: {time.perf_counter() - started:.0f} s", flush=True)
    _, grads, _ = jax.block_until_ready(program(*arguments))
    updates = {m: _update(o, grads, state.params) for m, o in optimizers.items()}
    times: dict[str, list[float]] = {name: [] for name in ("", *methods)}
    for _ in range(rounds):
        times[""].append(_cpu_seconds(lambda: program(*arguments)))
        for method, update in updates.items():
            times[method].append(_cpu_seconds(update))
    medians = {name: statistics.median(own) for name, own in times.items()}
    return Times(medians.pop(""), medians)


def _update(optimizer: optax.GradientTransformation, grads: Any, params: Any) -> Callable[[], Any]:
    """An update that goes on from its own state."""

    def update(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    program = jax.jit(update, donate_argnums=1)
    states = [jax.block_until_ready(jax.jit(optimizer.init)(params))]

    def run() -> Any:
        new, states[0] = program(grads, states[0], params)
        return new, states[0]

    for _ in range(2):  # the first lays the state out, the second compiles for that
        jax.block_until_ready(run())
    return run


def _cpu_seconds(function: Callable[[], Any]) -> float:
    started = time.process_time()
    jax.block_until_ready(function())
    return time.process_time() - started
