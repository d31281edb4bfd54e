"""The mean over replicas of what each has of its own, compressed or not, on global arrays."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.optim.codecs import Codec, HalfPrecision, Int8, OneBit
from jpipe.optim.fuse import Fused
from jpipe.optim.per_device import PerDevice, per_device, per_device_spec, put_back, take_own
from jpipe.optim.powersgd import first_factors, num_errors, powersgd_mean
from jpipe.optim.two_stage import BOTH, Feedback, two_stage_mean

Tree = Any
Method = Literal["none", "bf16", "fp16", "int8", "onebit", "powersgd"]

_CODECS: dict[str, Codec] = {
    "bf16": HalfPrecision(jnp.bfloat16),
    "fp16": HalfPrecision(jnp.float16),
    "int8": Int8(),
    "onebit": OneBit(),
}


class TwoStageMemory(NamedTuple):
    """What is fed back from step to step.

    Attributes:
        worker: `PerDevice` of `[num_blocks, block_size]`, what each worker has not said yet.
        server: `PerDevice` of `[num_blocks / replicas, block_size]`, what each server has not.
    """

    worker: PerDevice
    server: PerDevice


class PowerSGDMemory(NamedTuple):
    """What PowerSGD keeps from step to step.

    Attributes:
        error: `PerDevice` vector, what the factors have not said yet.
        factors: `PerDevice` vector, the right factors.
    """

    error: PerDevice
    factors: PerDevice


class ReductionState(NamedTuple):
    """State of a `Reduction`; whose optimizer has one wants gradients of each replica.

    Attributes:
        memory: of its method; () where nothing is lost.
    """

    memory: Any


class Reduction:
    """Takes the mean over a mesh axis.

    Args:
        method: what travels: `none` float32 (float64) numbers; `bf16`, `fp16` half of their bytes;
            `int8` about a quarter; `onebit` a sign each, and a scale for each block; `powersgd`
            two thin factors of each matrix.
        mesh: the mesh.
        specs: how parameters lie on it: a pytree of `PartitionSpec` like them (see
            `jpipe.pipeline.param_specs`), or None if all devices have all of them.
        axis: the mesh axis of the replicas; one that the mesh lacks is of size 1.
        block_size: numbers that share a scale; a multiple of 8.
        rank: columns of a factor of `powersgd`.
        feedback: which errors are fed back.

    Raises:
        ValueError: if an argument is none of those possible.
    """

    def __init__(
        self,
        method: Method,
        mesh: Mesh,
        specs: Tree | None = None,
        *,
        axis: str = "data",
        block_size: int = 256,
        rank: int = 8,
        feedback: Feedback = BOTH,
    ) -> None:
        if method not in get_args(Method):
            raise ValueError(f"method={method!r} is none of {', '.join(get_args(Method))}")
        if block_size < 8 or block_size % 8:
            raise ValueError(f"block_size={block_size} must be a positive multiple of 8")
        if rank < 1:
            raise ValueError(f"rank={rank} must be at least 1")
        self.replicas = mesh.shape.get(axis, 1)
        self._method, self._mesh, self._specs, self._axis = method, mesh, specs, axis
        self._block_size, self._rank, self._feedback = block_size, rank, feedback

    def init(self, params: Tree) -> ReductionState:
        """Nothing to feed back yet.

        Args:
            params: the parameters, or their shapes.

        Raises:
            ValueError: if `specs` do not fit them.
        """
        if self.replicas == 1 or self._method == "none":
            return ReductionState(())
        leaves = jax.tree.leaves(params)
        # optax asks for the state of placeholders, which have no leaves.
        specs = self._flat_specs(params) if leaves else []
        shapes = [
            self._own_shape(jnp.shape(a), spec) for a, spec in zip(leaves, specs, strict=True)
        ]

        if self._method == "powersgd":
            error = jnp.zeros(num_errors(shapes, self._rank), jnp.float32)
            factors = first_factors(shapes, self._rank)
            return ReductionState(
                PowerSGDMemory(*(per_device(self._mesh, a) for a in (error, factors)))
            )
        layout = self._layout(shapes)
        worker = jnp.zeros((layout.num_blocks, self._block_size), jnp.float32)
        server = worker[: layout.num_blocks // self.replicas]
        return ReductionState(
            TwoStageMemory(*(per_device(self._mesh, a) for a in (worker, server)))
        )

    def mean(self, values: Tree, state: ReductionState) -> tuple[Tree, ReductionState]:
        """The mean over the replicas.

        Args:
            values: pytree of `[replicas, ...]` arrays, what each replica has.
            state: the state before.

        Returns:
            The means, without the first dim and in the dtype of the values, the same bits on all
            replicas; and the new state.

        Raises:
            ValueError: if the first dim of a value is not the number of replicas.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(values):
            if not jnp.ndim(leaf) or leaf.shape[0] != self.replicas:
                raise ValueError(
                    f"values{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; its first "
                    f"dim must be that of the {self.replicas} replicas along {self._axis!r}: use "
                    "gradients of each replica, such as those of "
                    "pipeline_value_and_grad(..., per_replica=True)"
                )
        if self.replicas == 1:
            return jax.tree.map(lambda a: a[0], values), state
        leaves, structure = jax.tree.flatten(values)
        specs = self._flat_specs(values)
        memory_spec = per_device_spec(self._mesh)

        def on_device(leaves: list[jax.Array], memory: Tree) -> tuple[list[jax.Array], Tree]:
            own = [a.reshape(a.shape[1:]) for a in leaves]
            means, memory = self._mean_of_own(own, take_own(self._mesh, memory))
            means = [m.astype(a.dtype) for m, a in zip(means, own, strict=True)]
            return means, put_back(self._mesh, memory)

        means, memory = jax.shard_map(
            on_device,
            mesh=self._mesh,
            in_specs=([PartitionSpec(self._axis, *spec) for spec in specs], memory_spec),
            out_specs=(specs, memory_spec),
            check_vma=False,
        )(leaves, state.memory)
        return jax.tree.unflatten(structure, means), ReductionState(memory)

    def _mean_of_own(self, own: list[jax.Array], memory: Any) -> tuple[list[jax.Array], Any]:
        """On one device: the mean of its share of the values, and its memory."""
        if self._method == "none":
            wide = [a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in own]
            return [a / self.replicas for a in jax.lax.psum(wide, self._axis)], memory
        if self._method == "powersgd":
            means, error, factors = powersgd_mean(
                [a.astype(jnp.float32) for a in own],
                memory.error.value,
                memory.factors.value,
                rank=self._rank,
                axis=self._axis,
                feedback=self._feedback.worker,
            )
            return means, PowerSGDMemory(PerDevice(error), PerDevice(factors))
        layout = self._layout([a.shape for a in own])
        mean, worker, server = two_stage_mean(
            layout.fuse(own),
            memory.worker.value,
            memory.server.value,
            layout=layout,
            codec=_CODECS[self._method],
            axis=self._axis,
            feedback=self._feedback,
        )
        return layout.take_apart(mean), TwoStageMemory(PerDevice(worker), PerDevice(server))

    def _layout(self, shapes: Sequence[tuple[int, ...]]) -> Fused:
        return Fused(tuple(shapes), self._block_size, self.replicas)

    def _flat_specs(self, tree: Tree) -> list[PartitionSpec]:
        """How each leaf lies on the mesh."""
        structure: Any = jax.tree.structure(tree)
        if self._specs is None:
            return [PartitionSpec()] * structure.num_leaves
        if jax.tree.structure(self._specs) != structure:
            raise ValueError(
                f"specs has the structure {jax.tree.structure(self._specs)}, the parameters "
                f"{structure}; make them with jpipe.pipeline.param_specs(mesh, params)"
            )
        specs: list[PartitionSpec] = jax.tree.leaves(self._specs)
        for spec in specs:
            if any(self._axis in (e if isinstance(e, tuple) else (e,)) for e in spec):
                raise ValueError(
                    f"specs lays a parameter over {self._axis!r}: {spec}; its gradient is summed "
                    "where it is made, and no replica has one of its own: leave this axis out"
                )
        return specs

    def _own_shape(self, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
        return NamedSharding(self._mesh, spec).shard_shape(shape)
