"""A body made of repeated blocks, and how much of them is computed again."""

from collections.abc import Callable
from typing import Literal, get_args

import jax

from jpipe.pipeline.stages import Tree

Recompute = Literal["none", "block", "stage"]


def repeat_block(
    block: Callable[[Tree, Tree], Tree], recompute: Recompute = "none"
) -> Callable[[Tree, Tree], Tree]:
    """The body that applies a block once for each slice of its stacked parameters.

    The blocks are unrolled, not scanned: XLA then sees each one's weights as they are.

    Args:
        block: `(parameters of one block, x) -> x`.
        recompute: what the backward computes again instead of keeping it from the forward:
            `none`; `block`, each block from its input; `stage`, all blocks of a stage from the
            stage's input. Anything finer is the user's own `jax.checkpoint` inside `block`.

    Returns:
        A body for `Stages`.

    Raises:
        ValueError: if `recompute` is none of these.
    """
    check_recompute(recompute)

    def body(blocks: Tree, x: Tree) -> Tree:
        for k in range(jax.tree.leaves(blocks)[0].shape[0]):
            x = apply(jax.tree.map(lambda leaf, k=k: leaf[k], blocks), x)
        return x

    # Forward and backward lie in different branches, where XLA cannot merge them. Blocks of one
    # stage share a branch, and must be kept apart.
    apply = jax.checkpoint(block) if recompute == "block" else block
    return jax.checkpoint(body, prevent_cse=False) if recompute == "stage" else body


def check_recompute(recompute: str) -> None:
    """Refuse what is no `Recompute`.

    Raises:
        ValueError: naming it and the choices.
    """
    if recompute not in get_args(Recompute):
        raise ValueError(
            f"recompute={recompute!r} is unknown; choose one of {', '.join(get_args(Recompute))}"
        )
