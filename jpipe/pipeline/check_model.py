"""Refuse a model whose pieces do not fit each other or the batch. Traces, but does not compile."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jpipe.mesh import STAGE
from jpipe.pipeline.keys import block_keys, microbatch_keys
from jpipe.pipeline.losses import Loss, LossTerms
from jpipe.pipeline.per_stage import PerStage, chunks_of, map_chunks
from jpipe.pipeline.stages import Params, Part, Stages, Tree, describe, num_blocks, shapes_of
from jpipe.pipeline.state import check_updates


class Found(NamedTuple):
    """What was found of a model: shapes and dtypes of one microbatch.

    Attributes:
        outputs: of the head.
        updates: of the state, see `Stages.stateful`.
    """

    outputs: Tree
    updates: Params


def check_stages(
    stages: Stages,
    params: Params,
    state: Params,
    inputs: Tree,
    key: jax.Array | None,
    mesh: Mesh,
) -> Found:
    """Refuse a model whose pieces do not fit each other. Traces, but does not compile.

    Raises:
        ValueError: naming the stage and both shapes.
    """
    # An Explicit sharding is not the model's concern.
    params, state, inputs = shapes_of((params, state, inputs))
    inputs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), inputs)
    keys = jax.eval_shape(microbatch_keys, key, 0)
    stem, body, head = stages.parts
    x, of_stem = _trace("the stem", stem, params.stem, state.stem, inputs, keys.stem)
    if not jax.tree.leaves(x):
        raise ValueError("the stem's output holds no arrays; something must travel between stages")
    _check_floating("the stem", x)
    num_chunks = len(chunks_of(params.body))
    if len(chunks_of(body)) != num_chunks:
        raise ValueError(
            f"stages.body has {len(chunks_of(body))} chunks, params.body has {num_chunks}; give "
            "one Chunks entry for each"
        )
    before = "the stem"

    def check_chunk(body: Any, params: Tree, state: Tree) -> Tree:
        nonlocal x, before
        if isinstance(body, PerStage) != isinstance(params, PerStage):
            raise ValueError("stages.body and params.body must both be PerStage, or neither")
        if isinstance(body, PerStage):
            x, updates = _check_each_stage(body, params, state, x, keys.body, before)
            before = f"stage {len(body) - 1}"
            return updates
        return _check_equal_stages(body, params, state, x, keys.body, mesh)

    of_body = map_chunks(check_chunk, body, params.body, state.body)
    outputs, of_head = _trace("the head", head, params.head, state.head, x, keys.head)
    check_updates("stem", state.stem, of_stem)
    check_updates("head", state.head, of_head)
    return Found(outputs, Params(of_stem, of_body, of_head))


def _check_equal_stages(
    body: Part, params: Tree, state: Tree, x: Tree, key: Any, mesh: Mesh
) -> Tree:
    """Updates of the body's state."""
    num_stages = mesh.shape[STAGE]

    def resized(tree: Tree, scale: Callable[[int], int]) -> Tree:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((scale(a.shape[0]), *a.shape[1:]), a.dtype), tree
        )

    own, own_state = (resized(tree, lambda n: n // num_stages) for tree in (params, state))
    keys = jax.eval_shape(lambda k: block_keys(k, 0, num_blocks(own, own_state)), key)
    y, updates = _trace("the body", body, own, own_state, x, keys)
    if describe(x) != describe(y):
        after = "stage 1" if num_stages > 1 else "the head"
        raise ValueError(
            f"the output of stage 0 does not fit the input of {after}: the body makes "
            f"{describe(y)} of {describe(x)}; it must keep structure, shapes and dtypes"
        )
    check_updates("body", own_state, updates)
    return resized(updates, lambda n: n * num_stages)


def check_outputs(outputs: Tree) -> None:
    """Refuse outputs that cannot lie over the devices of an axis.

    Raises:
        ValueError: naming the output and its shape.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if not leaf.shape:
            raise ValueError(
                f"the head's output{jax.tree_util.keystr(path)} is a scalar; to predict, its first "
                "dim must hold the examples of a microbatch"
            )


def _trace(what: str, function: Any, params: Tree, state: Tree, x: Tree, key: Any) -> Any:
    """Shapes and dtypes of a result; what goes wrong is said of `what`."""
    try:
        result = jax.eval_shape(function, params, state, x, key)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} does not take {describe(x)}: {error}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"{what} returns {describe(result)}; with stateful=True it must return a pair, the "
            "output and the updates of its state"
        )
    return result


def _check_floating(name: str, output: Tree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(output):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{name}'s output{jax.tree_util.keystr(path)} has dtype {leaf.dtype}; what "
                "travels between stages must be floating-point, since gradients come back for it"
            )


def _check_each_stage(
    body: PerStage[Part],
    params: PerStage[Tree],
    state: PerStage[Tree],
    x: Tree,
    key: Any,
    before: str,
) -> tuple[Tree, PerStage[Tree]]:
    """What the last stage makes, and the updates of all."""
    if len(body) != len(params):
        raise ValueError(
            f"stages.body has {len(body)} functions, params.body parameters for {len(params)}"
        )
    updates = []
    for s, (run, own, own_state) in enumerate(zip(body, params, state, strict=True)):
        x, new = _trace(f"stage {s} after {before}", run, own, own_state, x, key)
        updates.append(new)
        before = f"stage {s}"
        _check_floating(before, x)
    check_updates("body", state, PerStage(*updates))
    return x, PerStage(*updates)


def check_loss(loss: Loss, outputs: Tree, targets: Tree, *, has_aux: bool) -> None:
    """Refuse a loss that is no floating-point scalar. Traces, but does not compile.

    Args:
        loss: the loss.
        outputs: shapes and dtypes of the head's outputs for one microbatch.
        targets: pytree of `[M, microbatch, ...]` arrays.
        has_aux: whether the caller asks for `LossTerms.aux`.

    Raises:
        ValueError: naming what the loss returns.
    """
    first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), shapes_of(targets))
    value = jax.eval_shape(loss, outputs, first)
    aux = jax.tree.leaves(value.aux) if isinstance(value, LossTerms) else []
    if aux and not has_aux:
        raise ValueError("loss returns LossTerms with aux; pass has_aux=True to get it")
    leaves = jax.tree.leaves(value[:2] if isinstance(value, LossTerms) else [value])
    expected = 2 if isinstance(value, LossTerms) else 1
    scalars = len(leaves) == expected and all(leaf.shape == () for leaf in leaves)
    if not scalars or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        raise ValueError(
            f"loss returned {describe(value)}; it must return one floating-point scalar, the mean "
            "over the microbatch, or LossTerms with a scalar total and weight"
        )
