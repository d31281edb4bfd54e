"""State of which every device has its own, as arrays that jit and checkpoints understand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerDevice:
    """An array for each device of a mesh.

    Attributes:
        value: array of shape `[*mesh, *own]`: a dim for each axis of the mesh, and then those of
            what one device has.
    """

    value: Any


def per_device(mesh: Mesh, own: jax.Array) -> PerDevice:
    """The same array on every device, to begin with."""
    return PerDevice(jnp.broadcast_to(own, (*mesh.devices.shape, *own.shape)))


def per_device_spec(mesh: Mesh) -> PartitionSpec:
    """How the value of a `PerDevice` lies: each device has its own."""
    return PartitionSpec(*mesh.axis_names)


def place_per_device(mesh: Mesh, state: Tree, shardings: Tree) -> Tree:
    """Shardings of a state, with those of each `PerDevice` set right.

    Args:
        mesh: the mesh.
        state: pytree of arrays, or of their shapes.
        shardings: a sharding for each.
    """

    def place(node: Any, found: Any) -> Any:
        if not isinstance(node, PerDevice):
            return found
        return PerDevice(NamedSharding(mesh, per_device_spec(mesh)))

    return jax.tree.map(place, state, shardings, is_leaf=lambda n: isinstance(n, PerDevice))


def take_own(mesh: Mesh, state: Tree) -> Tree:
    """Inside of `jax.shard_map`: what this device has of a pytree of `PerDevice`."""
    dims = mesh.devices.ndim
    return jax.tree.map(lambda a: a.reshape(a.shape[dims:]), state)


def put_back(mesh: Mesh, state: Tree) -> Tree:
    """Inside of `jax.shard_map`: the inverse of `take_own`."""
    ones = (1,) * mesh.devices.ndim
    return jax.tree.map(lambda a: a.reshape(*ones, *a.shape), state)
