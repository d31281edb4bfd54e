"""The optimizer of the command: AdamW, cosine schedule with warm-up, clipping."""

from typing import Any

import jax
import optax

Tree = Any


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm to 1.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019 (arXiv 1711.05101). The
    learning rate rises linearly over the first tenth of the steps (100 at most) and falls along a
    cosine to a tenth of its peak.

    Args:
        learning_rate: the peak.
        steps: length of the run.
    """
    warm_up = min(100, steps // 10)
    rate = optax.warmup_cosine_decay_schedule(
        init_value=learning_rate / (warm_up + 1),
        peak_value=learning_rate,
        warmup_steps=warm_up,
        decay_steps=max(steps, warm_up + 1),
        end_value=learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=_decays),
    )


def _decays(params: Tree) -> Tree:
    """Matrices decay; biases and the scales of norms do not. Told by name: blocks are stacked."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        return path[-1].key in ("kernel", "embedding")

    return jax.tree_util.tree_map_with_path(is_matrix, params)
