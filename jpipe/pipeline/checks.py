"""Refuse what cannot work, by name, before anything compiles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from jpipe.mesh import AXES, DATA, MODEL, STAGE
from jpipe.pipeline.keys import block_keys, microbatch_keys
from jpipe.pipeline.losses import Loss, LossTerms
from jpipe.pipeline.per_stage import PerStage, chunks_of, map_chunks
from jpipe.pipeline.stages import Params, Part, Stages, Tree, no_state, num_blocks, shapes_of
from jpipe.pipeline.state import check_updates
from jpipe.schedule.table import Schedule


def check_mesh(mesh: Mesh) -> None:
    """Refuse a mesh without a `stage` axis, or with axes that a pipeline does not use.

    Raises:
        ValueError: naming the axes.
    """
    unknown = set(mesh.axis_names) - set(AXES)
    if STAGE not in mesh.axis_names or unknown:
        raise ValueError(
            f"mesh has the axes {mesh.axis_names}; it needs {STAGE!r} and may have {DATA!r} and "
            f"{MODEL!r}: make one with jpipe.mesh.make_mesh"
        )


def check_divided(mesh: Mesh, manual: frozenset[str]) -> None:
    """Refuse axes over which XLA is to divide the work, but that wait to be told how.

    Args:
        mesh: the mesh.
        manual: the axes over which devices run apart, see `layout.manual_axes`.

    Raises:
        ValueError: naming the axes.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = [a for a in mesh.axis_names if a not in manual and types[a] != AxisType.Auto]
    if axes:
        raise ValueError(
            f"the mesh axis {' and '.join(map(repr, axes))} has the type {types[axes[0]].name}, "
            "but XLA divides the work over it, for a model with state, random numbers or "
            "annotations; make the mesh with jpipe.mesh.make_mesh, or with axis_types=AxisType.Auto"
        )


def check_trains(schedule: Schedule) -> None:
    """Refuse a table that is right, but that the training executor cannot run.

    Raises:
        ValueError: naming what the table lacks or has too much.
    """
    if not schedule.trains:
        raise ValueError(
            f"schedule {schedule.name!r} has no backwards and so gives no gradients; use a "
            "training schedule, or pipeline_evaluate for the loss alone"
        )


def as_params(params: Any) -> Params:
    """The parameters as `Params`.

    Raises:
        ValueError: if they are not three parts.
    """
    if not isinstance(params, tuple | list) or len(params) != 3:
        raise ValueError(
            f"params is a {type(params).__name__}; it must be Params(stem, body, head), with {{}} "
            "for a part without parameters"
        )
    parts = Params(*params)
    if not chunks_of(parts.body):
        raise ValueError("params.body is Chunks without any; give at least one")
    return parts


def check_schedule_fits(
    schedule: Schedule, mesh: Mesh, num_microbatches: int, num_chunks: int
) -> None:
    """Refuse a table for another number of stages, microbatches or chunks than there are.

    Raises:
        ValueError: naming both numbers.
    """
    if schedule.num_chunks != num_chunks:
        raise ValueError(
            f"schedule {schedule.name!r} is for {schedule.num_chunks} chunks a stage, the model is "
            f"cut into {num_chunks}; build it with num_chunks={num_chunks}, or cut the model into "
            f"{schedule.num_chunks} (num_chunks= of the adapters, Chunks without them)"
        )
    if schedule.num_stages != mesh.shape[STAGE]:
        raise ValueError(
            f"schedule {schedule.name!r} is for {schedule.num_stages} stages, the mesh has "
            f"{mesh.shape[STAGE]}; build it with num_stages={mesh.shape[STAGE]}"
        )
    if schedule.num_microbatches != num_microbatches:
        raise ValueError(
            f"schedule {schedule.name!r} is for {schedule.num_microbatches} microbatches, the data "
            f"has {num_microbatches}; build it with num_microbatches={num_microbatches}, or give "
            "the schedule's name to have it built for each batch"
        )


def check_batch(mesh: Mesh, **batch: Tree) -> int:
    """Refuse arrays that are not cut into the same microbatches.

    Args:
        mesh: the mesh.
        **batch: pytrees of arrays by argument name, such as `inputs` and `targets`.

    Returns:
        M, the number of microbatches.

    Raises:
        ValueError: if an array has no two leading dims, if two differ in them, or if a microbatch
            does not divide over the `data` axis; the arrays and shapes are named.
    """
    num_data = mesh.shape.get(DATA, 1)
    first: tuple[str, tuple[int, ...]] | None = None
    for name, tree in batch.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            label, shape = name + jax.tree_util.keystr(path), tuple(jnp.shape(leaf))
            if len(shape) < 2 or not shape[0] or not shape[1]:
                raise ValueError(
                    f"{label} has shape {shape}; it must be [microbatches, examples of a "
                    "microbatch, ...] with at least one of each"
                )
            if first is None:
                first = label, shape
            if shape[:2] != first[1][:2]:
                raise ValueError(
                    f"{label} has shape {shape} but {first[0]} has shape {first[1]}; their first "
                    "two dims, microbatches and examples of a microbatch, must be equal"
                )
    if first is None:
        raise ValueError(f"{' and '.join(batch)} hold no arrays; give at least one")
    num_microbatches, size = first[1][:2]
    if size % num_data:
        raise ValueError(
            f"{first[0]} has {size} examples a microbatch, which the {num_data} devices of the "
            f"{DATA!r} axis cannot share equally; make it a multiple of {num_data}"
        )
    return num_microbatches


def as_state(stages: Stages, params: Params, state: Any, key: jax.Array | None) -> Params:
    """State as `Params`; of a model without, the empty one.

    Raises:
        ValueError: if the model has no use for what is given, or it is of the wrong kind.
    """
    if key is not None and not (
        hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and not key.shape
    ):
        raise ValueError(f"key={key!r} must be one typed key, as jax.random.key makes it")
    if not stages.stateful and (key is not None or jax.tree.leaves(state)):
        raise ValueError(
            f"{'key' if key is not None else 'state'} is given, but the functions of stages take "
            "none; write them as `Stages.stateful` says and set stateful=True"
        )
    if state is None or not stages.stateful:
        return no_state(params)
    if not isinstance(state, tuple) or len(state) != len(Params._fields):
        raise ValueError(f"state is a {type(state).__name__}; it must be Params(stem, body, head)")
    for path, leaf in jax.tree_util.tree_leaves_with_path(Params(*state)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} is a random key; keys are no state, each part "
                "gets its own: pass key="
            )
    return Params(*state)


def check_params(params: Params, state: Params, mesh: Mesh) -> None:
    """Refuse parameters or state that cannot be trained or laid out over the stages.

    Raises:
        ValueError: naming the leaf, its shape or dtype, and what fits.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        label = "params" + jax.tree_util.keystr(path)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"{label} has dtype {leaf.dtype}; parameters must be floating-point")
    kinds = {"params.body": params.body, "state.body": state.body}
    chunks = {name: chunks_of(body) for name, body in kinds.items()}
    if len({len(own) for own in chunks.values()}) > 1:
        described = ", ".join(f"{name} has {len(own)}" for name, own in chunks.items())
        raise ValueError(f"the body must have the same number of chunks everywhere: {described}")
    counts = {}
    for c, bodies in enumerate(zip(*chunks.values(), strict=True)):
        place = f"[{c}]" if len(chunks["params.body"]) > 1 else ""
        named = {name + place: body for name, body in zip(chunks, bodies, strict=True)}
        counts[f"params.body{place}"] = _check_body(
            named, mesh.shape[STAGE], len(chunks["params.body"])
        )
    if len(set(counts.values())) > 1:
        described = ", ".join(f"{name} has {n}" for name, n in counts.items() if n)
        raise ValueError(
            f"chunks must all stack the same number of blocks, or all be PerStage: {described}"
        )
    for name, bodies in chunks.items():
        for c, body in enumerate(bodies):
            if not isinstance(body, PerStage) and _describe(body) != _describe(bodies[0]):
                raise ValueError(
                    f"{name}[{c}] is {_describe(body)}, {name}[0] is {_describe(bodies[0])}; "
                    "chunks of stacked blocks must be alike, others need a PerStage in each chunk"
                )


def _check_body(bodies: dict[str, Tree], num_stages: int, num_chunks: int) -> int:
    """Check parameters and state of one chunk; the number of its blocks, 0 if stages differ."""
    params, *_ = bodies.values()
    if isinstance(params, PerStage):
        for name, body in bodies.items():
            if not isinstance(body, PerStage) or len(body) != num_stages:
                found = f"for {len(body)} stages" if isinstance(body, PerStage) else "no PerStage"
                raise ValueError(
                    f"{name} is {found}, the mesh has {num_stages}; cut the model into "
                    f"{num_stages}, or use a mesh of {len(params)}"
                )
        return 0
    blocks: dict[int, str] = {}
    for name, body in bodies.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(body):
            label = name + jax.tree_util.keystr(path)
            if not leaf.shape:
                raise ValueError(f"{label} is a scalar; its first dim must hold the blocks")
            blocks.setdefault(leaf.shape[0], label)
    if len(blocks) > 1:
        described = ", ".join(f"{label} has {n}" for n, label in blocks.items())
        raise ValueError(f"the body must stack the same number of blocks: {described}")
    if not blocks:
        name = next(iter(bodies))
        raise ValueError(f"{name} holds no arrays; a pipeline needs blocks to cut into stages")
    check_blocks(next(iter(blocks)), num_stages, num_chunks)
    return next(iter(blocks))


def check_blocks(num_blocks: int, num_stages: int, num_chunks: int = 1) -> None:
    """Refuse blocks that do not divide over the stages.

    Args:
        num_blocks: of the model, or of each chunk.
        num_stages: P.
        num_chunks: V.

    Raises:
        ValueError: naming both numbers and the numbers of stages that fit.
    """
    if num_blocks % num_stages and num_chunks > 1:
        raise ValueError(
            f"{num_blocks * num_chunks} blocks (layers) in {num_chunks} chunks do not divide over "
            f"{num_stages} stages; use a multiple of {num_stages * num_chunks} layers"
        )
    if num_blocks % num_stages:
        fitting = [p for p in range(1, num_blocks + 1) if num_blocks % p == 0]
        less = num_blocks - num_blocks % num_stages
        more = less + num_stages
        layers = f"{less} or {more}" if less else f"{more}"
        raise ValueError(
            f"{num_blocks} blocks (layers) do not divide over {num_stages} stages; with "
            f"{num_blocks} use {', '.join(map(str, fitting))} stages, or with {num_stages} stages "
            f"use {layers} layers"
        )


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
    if _describe(x) != _describe(y):
        after = "stage 1" if num_stages > 1 else "the head"
        raise ValueError(
            f"the output of stage 0 does not fit the input of {after}: the body makes "
            f"{_describe(y)} of {_describe(x)}; it must keep structure, shapes and dtypes"
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
        raise ValueError(f"{what} does not take {_describe(x)}: {error}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"{what} returns {_describe(result)}; with stateful=True it must return a pair, the "
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
            f"loss returned {_describe(value)}; it must return one floating-point scalar, the mean "
            "over the microbatch, or LossTerms with a scalar total and weight"
        )


def _describe(tree: Tree) -> str:
    """Shapes and dtypes of a pytree in one line."""
    return str(jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree))
