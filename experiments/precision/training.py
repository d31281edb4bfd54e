"""One training, and the gradients of one batch."""

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import CONFIG, GROWTH_INTERVAL, MICROBATCH, MICROBATCHES, STRICT, Case, Curve
from flax import nnx
from jax.sharding import Mesh
from wrong import constant_loss_scale, half_sums, half_sums_step

from jpipe.adapters import FlaxPipeline, pipeline_from_nnx
from jpipe.data import Batch, TokenBatches, Tokens, validation_windows
from jpipe.models import GPT, next_token_loss
from jpipe.optim import dynamic_loss_scale
from jpipe.pipeline import pipeline_evaluate, pipeline_value_and_grad
from jpipe.precision import POLICIES
from jpipe.train_step import init_train_state, make_train_step

Tree = Any


def make_optimizer(case: Case, options: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW behind a clip, both for gradients of a weighted loss, and behind the loss scale."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, options.steps // 10, options.steps
    )
    inner = optax.chain(
        optax.clip_by_global_norm(case.weight), optax.adamw(rate, b2=0.95, eps=1e-8 * case.weight)
    )
    if case.scale is None:
        return inner
    if case.dynamic:
        return dynamic_loss_scale(inner, case.scale, growth_interval=GROWTH_INTERVAL)
    return constant_loss_scale(inner, case.scale)


@functools.cache
def model_of(precision: str) -> FlaxPipeline:
    """The GPT in a precision."""
    config = dataclasses.replace(CONFIG, policy=POLICIES[precision])
    return pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs), stem="embedding", body="blocks", head="head"
    )


def batches_of(tokens: Tokens, seed: int, steps: int) -> Iterator[Batch]:
    """The batches of a training."""
    batches = TokenBatches(
        tokens.train, context=CONFIG.context, microbatch_size=MICROBATCH, seed=seed
    )
    return (batches.next_step(MICROBATCHES) for _ in range(steps))


def train(case: Case, mesh: Mesh, tokens: Tokens, options: argparse.Namespace) -> Curve:
    """Train until the end, or until the loss is no number any more."""
    model, optimizer = model_of(case.precision), make_optimizer(case, options)

    def loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return case.weight * next_token_loss(logits, targets)

    state = init_train_state(lambda: model.init(nnx.Rngs(case.seed)), optimizer, mesh)
    if case.sums == "float32":
        step = make_train_step(model.stages, loss, optimizer, mesh)
    else:
        step = half_sums_step(model.stages, loss, optimizer)
    compiled: Any = None
    losses, scales, skipped = [], [], []
    for batch in batches_of(tokens, case.seed, options.steps):
        compiled = compiled or step.lower(state, *batch).compile(compiler_options=STRICT)
        state, metrics = compiled(state, *batch)
        value = float(metrics.loss) / case.weight
        if not np.isfinite(value):
            break
        losses.append(value)
        scales.append(float(metrics.loss_scale))
        skipped.append(bool(metrics.skipped))
    evaluate = pipeline_evaluate(model.eval_stages, next_token_loss, mesh)
    windows = validation_windows(
        tokens.validation, context=CONFIG.context, microbatch_size=MICROBATCH
    ).windows
    validation = float(evaluate(state.params, *windows))
    first = [*skipped, False].index(False)
    return Curve(losses, scales, sum(skipped), first, validation, state.params)


@dataclasses.dataclass(frozen=True)
class Loss16:
    """What is wrong with the gradients of one batch in float16.

    Attributes:
        lost: share of the numbers, not zero in float32, that are zero.
        error: norm of the difference from float32, over the norm.
        finite: whether all are finite.
        finite_half_sums: whether all are when summed over microbatches in float16.
    """

    lost: float
    error: float
    finite: bool
    finite_half_sums: bool


def gradients_by_scale(
    params: Tree, batch: Batch, mesh: Mesh, scales: list[float]
) -> dict[float, Loss16]:
    """Gradients in float16 by loss scale, beside those of float32."""

    def flat(grads: Tree) -> np.ndarray:
        return np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)])

    stages = {precision: model_of(precision).stages for precision in ("fp32", "fp16")}
    _, grads = pipeline_value_and_grad(stages["fp32"], next_token_loss, mesh)(params, *batch)
    right = flat(grads)

    def compiled(function: jax.stages.Wrapped, *args: Any) -> jax.stages.Compiled:
        return function.lower(params, *batch, *args, one).compile(compiler_options=STRICT)

    one = jnp.float32(1)
    own_sums = compiled(pipeline_value_and_grad(stages["fp16"], next_token_loss, mesh), None, None)
    careless = compiled(jax.jit(half_sums(stages["fp16"], next_token_loss)))
    found = {}
    for scale in scales:
        factor = jnp.float32(scale)
        own = flat(own_sums(params, *batch, None, None, factor)[1]) / scale
        summed = flat(careless(params, *batch, factor)[1])
        finite = bool(np.isfinite(own).all())
        found[scale] = Loss16(
            lost=float(np.mean(own[right != 0] == 0)),
            error=float(np.linalg.norm(own - right) / np.linalg.norm(right)) if finite else np.nan,
            finite=finite,
            finite_half_sums=bool(np.isfinite(summed).all()),
        )
    return found
