"""A body made of repeated blocks, and how much of them is computed again."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jpipe.pipeline.stages import Body, Part, Tree, num_blocks

Recompute = Literal["none", "block", "stage"]


def repeat_block(
    block: Callable[..., Any], recompute: Recompute = "none", *, stateful: bool = False
) -> Body:
    """The body that applies a block once for each slice of its stacked parameters.

    The blocks are unrolled, not scanned: XLA then sees each one's weights as they are.

    Args:
        block: `(parameters of one block, x) -> x`.
        recompute: what the backward computes again instead of keeping it from the forward:
            `none`; `block`, each block from its input; `stage`, all blocks of a stage from the
            stage's input. Anything finer is the user's own `jax.checkpoint` inside `block`.
        stateful: whether the block is `(parameters, state, x, key) -> (x, updates)`, as in
            `Stages.stateful`.

    Returns:
        A body for `Stages`.

    Raises:
        ValueError: if `recompute` is none of these.
    """
    check_recompute(recompute)
    if stateful:
        return _repeat_part(block, recompute)

    def body(blocks: Tree, x: Tree) -> Tree:
        for k in range(num_blocks(blocks, ())):
            x = apply(_slice(blocks, k), x)
        return x

    # Forward and backward lie in different branches, where XLA cannot merge them. Blocks of one
    # stage share a branch, and must be kept apart.
    apply = jax.checkpoint(block) if recompute == "block" else block
    return jax.checkpoint(body, prevent_cse=False) if recompute == "stage" else body


def _repeat_part(block: Part, recompute: Recompute) -> Part:
    def body(blocks: Tree, states: Tree, x: Tree, keys: Any) -> tuple[Tree, Tree]:
        updates = []
        for k in range(num_blocks(blocks, states)):
            key = None if keys is None else keys[k]
            x, new = apply(_slice(blocks, k), _slice(states, k), x, key)
            updates.append(new)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *updates) if updates else states

    apply = jax.checkpoint(block) if recompute == "block" else block
    return jax.checkpoint(body, prevent_cse=False) if recompute == "stage" else body


def _slice(stacked: Tree, k: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf[k], stacked)


def check_recompute(recompute: str) -> None:
    """Refuse what is no `Recompute`.

    Raises:
        ValueError: naming it and the choices.
    """
    if recompute not in get_args(Recompute):
        raise ValueError(
            f"recompute={recompute!r} is unknown; choose one of {', '.join(get_args(Recompute))}"
        )
