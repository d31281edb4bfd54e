"""Any number of examples as microbatches: the last is filled up, and what fills it not counted."""

from typing import Any

import jax
import jax.numpy as jnp

from jpipe.pipeline.losses import Loss, LossTerms, loss_terms

Tree = Any


def check_examples(microbatch_size: int, **batch: Tree) -> int:
    """Refuse arrays that do not hold the same examples.

    Args:
        microbatch_size: examples of a microbatch.
        **batch: pytrees of arrays by argument name.

    Returns:
        N, the number of examples.

    Raises:
        ValueError: naming the arrays and their shapes.
    """
    if microbatch_size < 1:
        raise ValueError(f"microbatch_size={microbatch_size} must be at least 1")
    shapes = [
        (name + jax.tree_util.keystr(path), jnp.shape(leaf))
        for name, tree in batch.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    if not shapes:
        raise ValueError(f"{' and '.join(batch)} hold no arrays; give at least one")
    for label, shape in shapes:
        if not shape or not shape[0]:
            raise ValueError(f"{label} has shape {shape}; its first dim must hold the examples")
        if shape[0] != shapes[0][1][0]:
            raise ValueError(
                f"{label} has shape {shape} but {shapes[0][0]} has shape {shapes[0][1]}; their "
                "first dim, the examples, must be equal"
            )
    return int(shapes[0][1][0])


def to_microbatches(tree: Tree, size: int) -> Tree:
    """Arrays of `[N, ...]` as `[M, size, ...]`; the last example is repeated to fill them."""

    def cut(array: Any) -> jax.Array:
        array = jnp.asarray(array)
        missing = -array.shape[0] % size
        filled = jnp.concatenate([array, jnp.repeat(array[-1:], missing, axis=0)])
        return filled.reshape(-1, size, *array.shape[1:])

    return jax.tree.map(cut, tree)


def which_count(count: int, size: int) -> jax.Array:
    """Which of the examples of microbatches are real, bool `[M, size]`."""
    return (jnp.arange(count + -count % size) < count).reshape(-1, size)


def from_microbatches(tree: Tree, count: int) -> Tree:
    """The inverse: the first `count` examples of `[M, size, ...]` arrays."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], tree)


def counted(loss: Loss) -> Loss:
    """A loss of `(outputs, (targets, counts))` that leaves out examples that do not count.

    Args:
        loss: of a microbatch; the mean, or the terms, over its examples each on its own.
    """

    def of_each(output: Tree, target: Tree, counts: jax.Array) -> LossTerms:
        alone = jax.tree.map(lambda a: a[None], (output, target))
        terms = loss_terms(loss(*alone))
        return jax.tree.map(lambda a: jnp.where(counts, a, jnp.zeros_like(a)), terms)

    def of_all(outputs: Tree, batch: tuple[Tree, jax.Array]) -> LossTerms:
        targets, counts = batch
        terms = jax.vmap(of_each)(outputs, targets, counts)
        return jax.tree.map(lambda a: jnp.sum(a, axis=0), terms)

    return of_all
