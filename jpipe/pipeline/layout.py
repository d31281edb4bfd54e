"""How parameters, gradients and batches lie on the mesh.

The blocks of a body of equal stages lie on their stages. All other parameters, of stem, head and
stages that differ, are each used by one stage; but every device runs the same program with arrays
of the same shapes, so none can have a parameter that the others lack. They are stored in equal
shares over the `stage` axis, and so is what the optimizer keeps for them, whatever the stages
weigh. A step brings them to where they are used once before its first tick, and shares out their
gradients once after its last. That is how ZeRO stores parameters over data-parallel devices
(Rajbhandari et al., 2020, arXiv 1910.02054), here over stages. A parameter keeps its name, shape
and place in the tree.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.mesh import DATA, STAGE, has_explicit_axes
from jpipe.pipeline.owners import Owners
from jpipe.pipeline.per_stage import PerStage, chunks_of, like_chunks, map_chunks
from jpipe.pipeline.stages import Params, Tree


def batch_spec(mesh: Mesh) -> PartitionSpec:
    """How `[M, microbatch, ...]` arrays lie on the mesh: each microbatch over `data`."""
    return PartitionSpec(None, DATA) if DATA in mesh.axis_names else PartitionSpec()


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding for `[M, microbatch, ...]` arrays of inputs and targets."""
    return NamedSharding(mesh, batch_spec(mesh))


def param_specs(mesh: Mesh, params: Params, partition: Params | None = None) -> Params:
    """How parameters and gradients lie on the mesh.

    Args:
        mesh: the mesh, with a `stage` axis.
        params: the parameters, or their shapes.
        partition: how they lie over other axes, see `Stages.partition`.

    Returns:
        A `Params` of partition specs: blocks over `stage` by their first dim, every other
        parameter over `stage` by its largest dim that divides, or whole everywhere if none does.
    """

    def share(leaf: jax.Array | jax.ShapeDtypeStruct, others: PartitionSpec) -> PartitionSpec:
        names = list(others) + [None] * (len(jnp.shape(leaf)) - len(others))
        dim = _shared_dim(jnp.shape(leaf), names, mesh.shape[STAGE])
        if dim is not None:
            names[dim] = STAGE
        while names and names[-1] is None:
            names.pop()
        return PartitionSpec(*names)

    def stacked(_: Any, others: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(STAGE, *others[1:])

    whole: Any = jax.tree.map(lambda _: PartitionSpec(), params)
    others = whole if partition is None else jax.tree.map(_on(mesh), params, partition)

    def place(body: Tree, others: Tree) -> Tree:
        return jax.tree.map(share if isinstance(body, PerStage) else stacked, body, others)

    return Params(
        stem=jax.tree.map(share, params.stem, others.stem),
        body=map_chunks(place, params.body, others.body),
        head=jax.tree.map(share, params.head, others.head),
    )


def param_shardings(mesh: Mesh, params: Params, partition: Params | None = None) -> Params:
    """The sharding of each parameter, and of each gradient.

    Args:
        mesh: the mesh, with a `stage` axis.
        params: the parameters, or their shapes.
        partition: how they lie over other axes, see `Stages.partition`.
    """
    specs = param_specs(mesh, params, partition)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def fsdp(mesh: Mesh, params: Params) -> Params:
    """A `Stages.partition` that lays each parameter over `data` by its largest dim that divides.

    Zhao et al., "PyTorch FSDP", 2023 (arXiv 2304.11277).

    Args:
        mesh: the mesh, with the axes `stage` and `data`.
        params: the parameters, or their shapes.
    """

    def divide(leaf: Any, leading: int) -> PartitionSpec:
        shape = jnp.shape(leaf)
        taken = [STAGE] * leading + [None] * (len(shape) - leading)
        count = mesh.shape.get(DATA, 1)
        dim = _shared_dim(shape, taken, count)
        return PartitionSpec() if dim is None or count == 1 else PartitionSpec(*[None] * dim, DATA)

    def divide_body(body: Tree) -> Tree:
        leading = 0 if isinstance(body, PerStage) else 1
        return jax.tree.map(lambda a: divide(a, leading), body)

    return Params(
        jax.tree.map(lambda a: divide(a, 0), params.stem),
        map_chunks(divide_body, params.body),
        jax.tree.map(lambda a: divide(a, 0), params.head),
    )


def _on(mesh: Mesh) -> Any:
    """What of a partition applies on a mesh: axes that it lacks are of size 1, so to speak."""

    def keep(leaf: Any, spec: PartitionSpec) -> PartitionSpec:
        names: list[Any] = []
        if len(spec) > len(jnp.shape(leaf)):
            raise ValueError(
                f"a parameter of shape {jnp.shape(leaf)} is annotated {spec}, which has more "
                "dims; leave some out"
            )
        for size, entry in zip(jnp.shape(leaf), spec, strict=False):
            axes = _axes(entry)
            if STAGE in axes:
                raise ValueError(f"partition={spec} names {STAGE!r}, which jpipe lays out itself")
            present = tuple(axis for axis in axes if axis in mesh.axis_names)
            count = math.prod(mesh.shape[axis] for axis in present)
            if size % count:
                raise ValueError(
                    f"a parameter of shape {jnp.shape(leaf)} is annotated {spec}, but {size} does "
                    f"not divide over {count} devices; annotate another dim, or use another mesh"
                )
            names.append((present if len(present) > 1 else present[0]) if present else None)
        return PartitionSpec(*names)

    return keep


def lies_over(axis: str, partition: Params | None) -> bool:
    """Whether any parameter lies over a mesh axis."""
    return any(axis in _axes(entry) for spec in jax.tree.leaves(partition) for entry in spec)


def _axes(entry: Any) -> tuple[Any, ...]:
    """The mesh axes in one entry of a partition spec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def manual_axes(mesh: Mesh, moving: Tree, key: Any, partition: Params | None) -> frozenset[str]:
    """The axes over which each device runs a program of its own; XLA divides the work over others.

    Over `model` XLA divides the work as the annotations of parameters suggest. Over `data` devices
    need nothing of each other until gradients are summed at the end of a step. Batch statistics and
    random numbers are another matter: they belong to the whole microbatch. For a model with these
    XLA divides each microbatch, and exchanges what it takes to have the numbers of one device; it
    then sums gradients over `data` after each microbatch.

    Args:
        mesh: the mesh.
        moving: what the model updates in each microbatch.
        key: the step's random key, or None.
        partition: how parameters lie over axes but `stage`; if over `data`, XLA divides that, too.
    """
    whole = lies_over(DATA, partition) or key is not None or bool(jax.tree.leaves(moving))
    return _axes_or_single(mesh, {STAGE} if whole else {STAGE, DATA})


def apart_axes(mesh: Mesh) -> frozenset[str]:
    """The same where replicas along `data` need nothing of each other, whatever the model."""
    return _axes_or_single(mesh, {STAGE, DATA})


def _axes_or_single(mesh: Mesh, axes: set[str]) -> frozenset[str]:
    return frozenset(axis for axis in mesh.axis_names if axis in axes or mesh.shape[axis] == 1)


def only(axes: frozenset[str], spec: PartitionSpec) -> PartitionSpec:
    """The part of a spec that speaks of some axes."""
    kept = (tuple(axis for axis in _axes(entry) if axis in axes) for entry in spec)
    return PartitionSpec(*((k if len(k) > 1 else k[0]) if k else None for k in kept))


def only_axes(axes: frozenset[str], specs: Tree) -> Tree:
    """The same of a pytree of specs."""
    return jax.tree.map(lambda spec: only(axes, spec), specs)


def lay_out(mesh: Mesh, variables: Tree, specs: Tree, *batch: Tree) -> tuple[Any, ...]:
    """Variables and batch as they lie, before each device goes its own way.

    Args:
        mesh: the mesh.
        variables: any pytree of arrays.
        specs: a partition spec for each.
        *batch: pytrees of `[M, microbatch, ...]` arrays.
    """
    place = jax.reshard if has_explicit_axes(mesh) else jax.lax.with_sharding_constraint
    over_data = batch_sharding(mesh)
    return (
        jax.tree.map(lambda a, spec: place(a, NamedSharding(mesh, spec)), variables, specs),
        *(jax.tree.map(lambda a: place(a, over_data), tree) for tree in batch),
    )


def gather_params(params: Params, specs: Params, *, folded: bool = False) -> Params:
    """This device's share of the parameters, made ready for the stage it runs.

    Args:
        params: what `param_specs` leaves of the parameters on a device.
        specs: those specs.
        folded: whether every other chunk goes back over the stages, see `Schedule`: its pieces then
            are brought to where they run.

    Returns:
        Stem and head whole; of the body the stage's own blocks, or packed vectors of its own
        parameters if the stages differ.
    """

    def gather(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        if STAGE not in spec:
            return leaf
        return jax.lax.all_gather(leaf, STAGE, axis=spec.index(STAGE), tiled=True)

    def gather_body(c: int, body: Tree, specs: Tree) -> Tree:
        back = folded and c % 2 == 1
        if isinstance(body, PerStage):
            body, specs = (_backwards(tree) if back else tree for tree in (body, specs))
            return Owners(body, specs).bring(body)
        return _swap(body) if back else body

    return Params(
        stem=jax.tree.map(gather, params.stem, specs.stem),
        body=map_chunks(gather_body, _numbers(params.body), params.body, specs.body),
        head=jax.tree.map(gather, params.head, specs.head),
    )


def share_grads(grads: Params, params: Params, specs: Params, *, folded: bool = False) -> Params:
    """Sum gradients over the stages, and leave each with its share; the inverse of the gather.

    Args:
        grads: of the body of this stage, as `gather_params` has it, and of the whole stem and
            head: zeros except on the stage that runs them.
        params: what `param_specs` leaves of the parameters on a device.
        specs: those specs.
        folded: as for `gather_params`.
    """
    return _share_out(grads, params, specs, folded)


def mean_state(state: Params, axis: str) -> Params:
    """The mean of state over replicas, in at least float32; what is no fraction is the largest."""

    def mean(a: jax.Array) -> jax.Array:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return jax.lax.pmax(a, axis)
        return jax.lax.pmean(a.astype(_summable(a.dtype)), axis).astype(a.dtype)

    mean_of_all: Params = jax.tree.map(mean, state)
    return mean_of_all


def share_state(
    state: Params, stored: Params, specs: Params, last: int, *, folded: bool = False
) -> Params:
    """Leave each device with its share of the state; the inverse of the gather.

    Args:
        state: of the body of this stage, as `gather_params` has it, and of stem and head: up to
            date on the stage that runs them.
        stored: what `param_specs` leaves of the state on a device.
        specs: those specs.
        last: the stage that runs the head.
        folded: as for `gather_params`.
    """
    stage = jax.lax.axis_index(STAGE)

    def of(owner: jax.Array | int, tree: Tree) -> Tree:
        return jax.tree.map(lambda a: jnp.where(stage == owner, a, jnp.zeros_like(a)), tree)

    owned = Params(of(0, state.stem), state.body, of(last, state.head))
    # Sums in these dtypes are certain to work, and exact: there is one number, and zeros.
    wide = jax.tree.map(lambda a: a.astype(_summable(a.dtype)), owned)
    shared = _share_out(wide, stored, specs, folded)
    return jax.tree.map(lambda a, s: a.astype(s.dtype), shared, stored)


def _share_out(whole: Params, stored: Params, specs: Params, folded: bool) -> Params:
    def share_body(c: int, stored: Tree, specs: Tree, body: Tree) -> Tree:
        back = folded and c % 2 == 1
        if isinstance(stored, PerStage):
            stored, specs = (_backwards(tree) if back else tree for tree in (stored, specs))
            shares = Owners(stored, specs).share_out(body)
            return _backwards(shares) if back else shares
        return _swap(body) if back else body

    return Params(
        stem=jax.tree.map(_sum_to_share, whole.stem, specs.stem),
        body=map_chunks(share_body, _numbers(stored.body), stored.body, specs.body, whole.body),
        head=jax.tree.map(_sum_to_share, whole.head, specs.head),
    )


def _numbers(body: Tree) -> Any:
    """The number of each chunk, in place of the chunk."""
    return like_chunks(body, range(len(chunks_of(body))))


def _backwards(pieces: PerStage[Tree]) -> PerStage[Tree]:
    return PerStage(*reversed(tuple(pieces)))


def _swap(blocks: Tree) -> Tree:
    """Blocks of the first stage for those of the last, and so on: its own inverse."""
    count = jax.lax.axis_size(STAGE)
    edges = [(s, count - 1 - s) for s in range(count)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, STAGE, edges), blocks)


def _sum_to_share(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
    if STAGE not in spec:
        return jax.lax.psum(leaf, STAGE)
    dim = spec.index(STAGE)
    return jax.lax.psum_scatter(leaf, STAGE, scatter_dimension=dim, tiled=True)


def _summable(dtype: Any) -> Any:
    return jnp.promote_types(
        dtype, jnp.float32 if jnp.issubdtype(dtype, jnp.inexact) else jnp.int32
    )


def _shared_dim(shape: Tree, names: Sequence[Any], count: int) -> int | None:
    """The largest dim, of those that lie nowhere yet, that so many devices can share equally."""
    dims = [
        dim for dim, size in enumerate(shape) if size and size % count == 0 and names[dim] is None
    ]
    return max(dims, key=lambda dim: shape[dim], default=None)
