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

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.mesh import DATA, STAGE, has_explicit_axes
from jpipe.pipeline.owners import Owners
from jpipe.pipeline.per_stage import PerStage
from jpipe.pipeline.stages import Params, Tree


def batch_spec(mesh: Mesh) -> PartitionSpec:
    """How `[M, microbatch, ...]` arrays lie on the mesh: each microbatch over `data`."""
    return PartitionSpec(None, DATA) if DATA in mesh.axis_names else PartitionSpec()


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding for `[M, microbatch, ...]` arrays of inputs and targets."""
    return NamedSharding(mesh, batch_spec(mesh))


def param_specs(mesh: Mesh, params: Params) -> Params:
    """How parameters and gradients lie on the mesh.

    Args:
        mesh: the mesh, with a `stage` axis.
        params: the parameters, or their shapes.

    Returns:
        A `Params` of partition specs: blocks over `stage` by their first dim, every other
        parameter over `stage` by its largest dim that divides, or whole everywhere if none does.
    """

    def share(leaf: jax.Array | jax.ShapeDtypeStruct) -> PartitionSpec:
        dim = _shared_dim(jnp.shape(leaf), mesh.shape[STAGE])
        return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, STAGE)

    def stacked(_: Any) -> PartitionSpec:
        return PartitionSpec(STAGE)

    place = share if isinstance(params.body, PerStage) else stacked
    return Params(
        stem=jax.tree.map(share, params.stem),
        body=jax.tree.map(place, params.body),
        head=jax.tree.map(share, params.head),
    )


def param_shardings(mesh: Mesh, params: Params) -> Params:
    """The sharding of each parameter, and of each gradient.

    Args:
        mesh: the mesh, with a `stage` axis.
        params: the parameters, or their shapes.
    """
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(mesh, params))


def manual_axes(mesh: Mesh, moving: Tree, key: Any) -> frozenset[str]:
    """The axes over which each device runs a program of its own; XLA divides the work over others.

    Over `data` devices need nothing of each other until gradients are summed at the end of a step.
    Batch statistics and random numbers are another matter: they belong to the whole microbatch. For
    a model with these XLA divides each microbatch, and exchanges what it takes to have the numbers
    of one device; it then sums gradients over `data` after each microbatch.

    Args:
        mesh: the mesh.
        moving: what the model updates in each microbatch.
        key: the step's random key, or None.
    """
    whole = key is not None or bool(jax.tree.leaves(moving))
    return frozenset({STAGE} if whole else {STAGE, DATA} & set(mesh.axis_names))


def only(axes: frozenset[str], spec: PartitionSpec) -> PartitionSpec:
    """The part of a spec that speaks of some axes."""
    return PartitionSpec(*(name if name in axes else None for name in spec))


def lay_out(mesh: Mesh, variables: Tree, *batch: Tree) -> tuple[Any, ...]:
    """Variables (each kind a `Params`) and batch as they lie, before each device goes its own way.

    On `Explicit` axes, which `jax.make_mesh` gives by default, `shard_map` refuses arrays that lie
    otherwise.
    """
    sharding = batch_sharding(mesh)
    if not has_explicit_axes(mesh):
        return variables, *jax.lax.with_sharding_constraint(batch, sharding)
    return (
        type(variables)(
            *(jax.tree.map(jax.reshard, kind, param_shardings(mesh, kind)) for kind in variables)
        ),
        *(jax.tree.map(lambda a: jax.reshard(a, sharding), tree) for tree in batch),
    )


def gather_params(params: Params, specs: Params) -> Params:
    """This device's share of the parameters, made ready for the stage it runs.

    Args:
        params: what `param_specs` leaves of the parameters on a device.
        specs: those specs.

    Returns:
        Stem and head whole; of the body the stage's own blocks, or packed vectors of its own
        parameters if the stages differ.
    """

    def gather(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        if STAGE not in spec:
            return leaf
        return jax.lax.all_gather(leaf, STAGE, axis=spec.index(STAGE), tiled=True)

    body = params.body
    return Params(
        stem=jax.tree.map(gather, params.stem, specs.stem),
        body=Owners(body, specs.body).bring(body) if isinstance(body, PerStage) else body,
        head=jax.tree.map(gather, params.head, specs.head),
    )


def reduce_grads(grads: Params, params: Params, specs: Params, manual: frozenset[str]) -> Params:
    """Sum gradients over the devices, and leave each with its share; the inverse of the gather.

    Args:
        grads: of the body of this stage, as `gather_params` has it, and of the whole stem and
            head: zeros except on the stage that runs them.
        params: what `param_specs` leaves of the parameters on a device.
        specs: those specs.
        manual: the mesh axes over which devices run apart.
    """

    grads = _share_out(grads, params, specs)
    return jax.lax.psum(grads, DATA) if DATA in manual else grads


def share_state(state: Params, stored: Params, specs: Params) -> Params:
    """Leave each device with its share of the state; the inverse of the gather.

    Args:
        state: of the body of this stage, as `gather_params` has it, and of stem and head: up to
            date on the stage that runs them.
        stored: what `param_specs` leaves of the state on a device.
        specs: those specs.
    """
    stage, last = jax.lax.axis_index(STAGE), jax.lax.axis_size(STAGE) - 1

    def of(owner: jax.Array | int, tree: Tree) -> Tree:
        return jax.tree.map(lambda a: jnp.where(stage == owner, a, jnp.zeros_like(a)), tree)

    owned = Params(of(0, state.stem), state.body, of(last, state.head))
    # Sums in these dtypes are certain to work, and exact: there is one number, and zeros.
    wide = jax.tree.map(lambda a: a.astype(_summable(a.dtype)), owned)
    return jax.tree.map(lambda a, s: a.astype(s.dtype), _share_out(wide, stored, specs), stored)


def _share_out(whole: Params, stored: Params, specs: Params) -> Params:
    body = whole.body
    if isinstance(stored.body, PerStage):
        body = Owners(stored.body, specs.body).share_out(body)
    return Params(
        stem=jax.tree.map(_sum_to_share, whole.stem, specs.stem),
        body=body,
        head=jax.tree.map(_sum_to_share, whole.head, specs.head),
    )


def _sum_to_share(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
    if STAGE not in spec:
        return jax.lax.psum(leaf, STAGE)
    dim = spec.index(STAGE)
    return jax.lax.psum_scatter(leaf, STAGE, scatter_dimension=dim, tiled=True)


def _summable(dtype: Any) -> Any:
    return jnp.promote_types(
        dtype, jnp.float32 if jnp.issubdtype(dtype, jnp.inexact) else jnp.int32
    )


def _shared_dim(shape: Tree, num_stages: int) -> int | None:
    """The largest dim that the stages can share equally."""
    dims = [dim for dim, size in enumerate(shape) if size and size % num_stages == 0]
    return max(dims, key=lambda dim: shape[dim], default=None)
