"""The mean gradient over the replicas of a mesh axis, as an optax transformation."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jpipe.optim.reduction import Method, Reduction, ReductionState
from jpipe.optim.two_stage import BOTH, Feedback

Tree = Any


def compressed_all_reduce(
    method: Method,
    mesh: Mesh,
    specs: Tree | None = None,
    *,
    axis: str = "data",
    block_size: int = 256,
    rank: int = 8,
    feedback: Feedback = BOTH,
) -> optax.GradientTransformation:
    """From the gradients of each replica to their mean, with few bytes on the wire.

    The updates that come in are `[replicas, ...]` arrays, laid over `axis` by their first dim:
    what `pipeline_value_and_grad(..., per_replica=True)` returns, or without a pipeline
    `jax.vmap(jax.grad(loss), (None, 0))` of a batch cut likewise. Those that go out are like the
    parameters. All other transformations come after this one in the chain.

    What an encoding loses is fed back in the next step, on the side of the worker and of the
    server, so that nothing is lost for good (Karimireddy et al., 2019, arXiv 1901.09847). For the
    two exchanges of every method but `none` and `powersgd` see `jpipe.optim.two_stage`, for these
    `jpipe.optim.powersgd`. With one replica nothing is exchanged and nothing compressed.

    Args:
        method: `none`, `bf16`, `fp16`, `int8`, `onebit` or `powersgd`, see `Reduction`.
        mesh: the mesh.
        specs: how parameters lie on it, see `Reduction`.
        axis: the mesh axis of the replicas.
        block_size: numbers that share a scale; a multiple of 8.
        rank: columns of a factor of `powersgd`.
        feedback: which errors are fed back.

    Raises:
        ValueError: if an argument is none of those possible; of its `update`, if the updates are
            not those of each replica.
    """
    reduction = Reduction(
        method, mesh, specs, axis=axis, block_size=block_size, rank=rank, feedback=feedback
    )

    def update_fn(
        updates: Tree, state: ReductionState, params: Tree | None = None
    ) -> tuple[Tree, ReductionState]:
        del params
        return reduction.mean(updates, state)

    return optax.GradientTransformation(reduction.init, update_fn)


def wants_gradient_of_each_replica(opt_state: optax.OptState) -> bool:
    """Whether an optimizer, told by its state, takes the mean over the replicas by itself."""

    def is_reduction(node: Any) -> bool:
        return isinstance(node, ReductionState)

    return any(map(is_reduction, jax.tree.leaves(opt_state, is_leaf=is_reduction)))
