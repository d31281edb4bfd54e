"""Refuse arguments that cannot work, by name, before anything compiles or is traced."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from jpipe.mesh import AXES, DATA, MODEL, STAGE
from jpipe.pipeline.per_stage import PerStage, chunks_of
from jpipe.pipeline.stages import Params, Stages, Tree, describe, no_state
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


def check_replicas(divided: bool) -> None:
    """Refuse gradients of each replica where no replica has all parameters.

    Args:
        divided: whether parameters lie over `data`.

    Raises:
        ValueError: if they do.
    """
    if divided:
        raise ValueError(
            f"the model's partition lays parameters over {DATA!r} (FSDP), where gradients are "
            "summed as they are made; gradients of each replica (per_replica=True, compression) "
            f"need a partition without {DATA!r}"
        )


def check_verifiable(mesh: Mesh, manual: frozenset[str]) -> None:
    """Refuse checksums of what no device has whole.

    Args:
        mesh: the mesh.
        manual: the axes over which devices run apart, see `layout.manual_axes`.

    Raises:
        ValueError: naming the axes over which XLA divides activations.
    """
    axes = [axis for axis in mesh.axis_names if axis not in manual]
    if axes:
        raise ValueError(
            f"verify=True needs devices that each run a program of their own, but over "
            f"{' and '.join(map(repr, axes))} XLA divides the work of this model, and exchanges "
            "what it likes; leave it out, use a mesh of one device along that axis, or, over "
            "'data', per_replica=True (compression)"
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
            if not isinstance(body, PerStage) and describe(body) != describe(bodies[0]):
                raise ValueError(
                    f"{name}[{c}] is {describe(body)}, {name}[0] is {describe(bodies[0])}; "
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
