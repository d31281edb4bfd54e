"""The optimizer of the command: AdamW, cosine schedule with warm-up, clipping.

With `--precision fp16` behind a dynamic loss scale, with `--compression` behind a compressed mean
of the gradients, or as 1-bit Adam.
"""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jpipe.optim import compressed_all_reduce, dynamic_loss_scale, scale_by_onebit_adam
from jpipe.train.options import ONEBIT_ADAM, TrainOptions

Tree = Any

_MAX_NORM = 1.0
_WEIGHT_DECAY = 0.1
_B2 = 0.95
_B2_ONEBIT = 0.99  # a variance that is frozen should not be that of the last few steps


def make_optimizer(
    options: TrainOptions, mesh: Mesh | None = None, specs: Tree | None = None
) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm to 1.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019 (arXiv 1711.05101). The
    learning rate rises linearly over the first tenth of the steps (100 at most) and falls along a
    cosine to a tenth of its peak.

    Args:
        options: of the run.
        mesh: the mesh; None for one device, where nothing travels.
        specs: how parameters lie on it.
    """
    rate = _learning_rate(options)
    plain = optax.chain(
        optax.clip_by_global_norm(_MAX_NORM),
        optax.adamw(rate, b2=_B2, weight_decay=_WEIGHT_DECAY, mask=_decays),
    )
    optimizer: optax.GradientTransformation
    if mesh is None or options.compression == "none":
        optimizer = plain
    elif options.compression == ONEBIT_ADAM:
        freeze_step = options.freeze_step or max(1, options.steps // 5)
        optimizer = optax.chain(
            scale_by_onebit_adam(
                mesh, specs, freeze_step=freeze_step, b2=_B2_ONEBIT, max_norm=_MAX_NORM
            ),
            optax.add_decayed_weights(_WEIGHT_DECAY, _decays),
            optax.scale_by_learning_rate(rate),
        )
    else:
        method: Any = options.compression
        optimizer = optax.chain(compressed_all_reduce(method, mesh, specs), plain)
    return dynamic_loss_scale(optimizer) if options.precision == "fp16" else optimizer


def _learning_rate(options: TrainOptions) -> optax.Schedule:
    warm_up = min(100, options.steps // 10)
    return optax.warmup_cosine_decay_schedule(
        init_value=options.learning_rate / (warm_up + 1),
        peak_value=options.learning_rate,
        warmup_steps=warm_up,
        decay_steps=max(options.steps, warm_up + 1),
        end_value=options.learning_rate / 10,
    )


def _decays(params: Tree) -> Tree:
    """Matrices decay; biases and the scales of norms do not. Told by name: blocks are stacked."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        return path[-1].key in ("kernel", "embedding")

    return jax.tree_util.tree_map_with_path(is_matrix, params)
