"""What compressed gradients cost, what they save, and why errors are fed back.

    python experiments/compression/measure.py

A GPT on two simulated stages and four replicas, with the command's own optimizer, for every method
of `--compression`, and for other settings of it. Then a small problem whose answer is known, with
and without error feedback. Writes RESULTS.md and compression.png beside this file.
"""

import argparse
import time
import warnings
from typing import Any

import ablation
import jax
import numpy as np
import optax
from cases import (
    AUTO,
    CONFIG,
    FINER,
    FREEZING,
    MAIN,
    MICROBATCH,
    MICROBATCHES,
    NEVER,
    NONE,
    ONEBIT_ADAM,
    REPLICAS,
    STAGES,
    Case,
    Result,
)
from flax import nnx
from jax.sharding import Mesh
from report import draw, write
from wire import bytes_sent

from jpipe.adapters import FlaxPipeline, pipeline_from_nnx
from jpipe.data import TokenBatches, Tokens, load_tokens, validation_windows
from jpipe.mesh import make_mesh, simulate_devices
from jpipe.models import GPT, next_token_loss
from jpipe.optim import OneBitAdamState, compressed_all_reduce, scale_by_onebit_adam
from jpipe.pipeline import param_specs, pipeline_evaluate
from jpipe.train.optimizer import make_optimizer
from jpipe.train.options import TrainOptions
from jpipe.train_step import init_train_state, make_train_step

Tree = Any


def optimizer_of(case: Case, mesh: Mesh, specs: Tree, steps: int) -> optax.GradientTransformation:
    """The command's optimizer, or the same with settings that the command does not have."""
    alone = TrainOptions(steps=steps, learning_rate=case.rate)
    if case.method == ONEBIT_ADAM:
        if case.b2 is not None or case.freeze == AUTO:
            return onebit_adamw(case, mesh, specs, steps)
        options = TrainOptions(
            steps=steps,
            learning_rate=case.rate,
            compression=case.method,
            freeze_step=freeze_step(case, steps),
        )
        return make_optimizer(options, mesh, specs)
    method: Any = case.method
    settings: Any = {"block_size": case.block_size, "rank": case.rank}
    settings = {name: value for name, value in settings.items() if value is not None}
    if method == "none":
        return make_optimizer(alone)
    return optax.chain(
        compressed_all_reduce(method, mesh, specs, **settings), make_optimizer(alone)
    )


def onebit_adamw(case: Case, mesh: Mesh, specs: Tree, steps: int) -> optax.GradientTransformation:
    """As `make_optimizer` builds it, with another b2 or a freeze that it finds by itself."""
    warm_up = min(100, steps // 10)
    rate = optax.warmup_cosine_decay_schedule(
        case.rate / (warm_up + 1), case.rate, warm_up, steps, case.rate / 10
    )

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        return path[-1].key in ("kernel", "embedding")

    return optax.chain(
        scale_by_onebit_adam(
            mesh,
            specs,
            freeze_step=None if case.freeze == AUTO else steps // 5,
            b2=0.99 if case.b2 is None else case.b2,
            max_norm=1.0,
        ),
        optax.add_decayed_weights(
            0.1, lambda params: jax.tree_util.tree_map_with_path(is_matrix, params)
        ),
        optax.scale_by_learning_rate(rate),
    )


def freeze_step(case: Case, steps: int) -> int | None:
    """The command's `--freeze-step`."""
    if case.freeze is None:
        return None
    return steps + 1 if case.freeze == NEVER else max(1, round(float(case.freeze) * steps))


def train(case: Case, model: FlaxPipeline, mesh: Mesh, tokens: Tokens, steps: int) -> Result:
    """Train until the end, or until the loss is no number any more."""
    started = time.perf_counter()

    def init() -> Any:
        return model.init(nnx.Rngs(case.seed))

    optimizer = optimizer_of(case, mesh, param_specs(mesh, jax.eval_shape(init)), steps)
    state = init_train_state(init, optimizer, mesh)
    batches = TokenBatches(
        tokens.train, context=CONFIG.context, microbatch_size=MICROBATCH, seed=case.seed
    )
    step: Any = None
    losses: list[float] = []
    for _ in range(steps):
        batch = batches.next_step(MICROBATCHES)
        if step is None:
            jitted = make_train_step(model.stages, next_token_loss, optimizer, mesh)
            step = jitted.lower(state, *batch).compile()
        state, metrics = step(state, *batch)
        losses.append(float(metrics.loss))
        if not np.isfinite(losses[-1]):
            break
    evaluate = pipeline_evaluate(model.eval_stages, next_token_loss, mesh)
    windows = validation_windows(
        tokens.validation, context=CONFIG.context, microbatch_size=MICROBATCH
    ).windows
    sent = bytes_sent(step.as_text(), mesh)
    frozen_at = frozen_step(state.opt_state)
    first = sent.always + (sent.branches[0] if sent.branches else 0)
    compressed = sent.branches and frozen_at is not None
    return Result(
        losses=losses,
        validation=float(evaluate(state.params, *windows)),
        bytes_first=first,
        bytes_last=sent.always + sent.branches[1] if compressed else first,
        frozen_at=frozen_at,
        seconds=time.perf_counter() - started,
    )


def frozen_step(opt_state: optax.OptState) -> int | None:
    """After which step 1-bit Adam froze its variance; None if it never did."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, OneBitAdamState))
    found = [int(node.frozen_at) for node in nodes if isinstance(node, OneBitAdamState)]
    return (found[0] or None) if found else None


def main() -> None:
    """Train, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    # Each case compiles the same model and loss with another optimizer.
    warnings.filterwarnings("ignore", message="the same program was compiled")
    simulate_devices(max(STAGES * REPLICAS, ablation.WORKERS))
    mesh, tokens = make_mesh(STAGES, REPLICAS), load_tokens()
    model = pipeline_from_nnx(
        lambda rngs: GPT(CONFIG, rngs=rngs), stem="embedding", body="blocks", head="head"
    )
    results: dict[Case, Result] = {}
    for case in [*MAIN, *NONE, *FINER, *FREEZING]:
        results[case] = found = train(case, model, mesh, tokens, options.steps)
        print(
            f"{case.rate} {case.name}: {found.validation:.4f}, {found.bytes_last:,.0f} bytes, "
            f"{found.seconds:.0f} s",
            flush=True,
        )
    errors = ablation.run()
    write(results, errors, options.steps, time.process_time())
    draw(results, errors)


if __name__ == "__main__":
    main()
