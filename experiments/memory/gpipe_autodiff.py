"""GPipe the way it is usually written in JAX: autodiff through a scan that passes activations on.

Every microbatch's residuals live until its backward, which autodiff runs after all forwards.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jpipe.pipeline import Params, Stages

Tree = Any


def gpipe_loss(stages: Stages, loss: Any, mesh: Mesh) -> Any:
    """A differentiable `(params, inputs, targets) -> loss` of equal stages without state."""
    num_stages = mesh.shape["stage"]
    stem, body, head = stages.parts

    def on_stage(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        stage, count = jax.lax.axis_index("stage"), inputs.shape[0]
        first = stem(params.stem, (), inputs[0], None)[0]

        def tick(x: Tree, t: jax.Array) -> tuple[Tree, Tree]:
            entering = stem(params.stem, (), inputs[jnp.minimum(t, count - 1)], None)[0]
            y, _ = body(params.body, (), jnp.where(stage == 0, entering, x), None)
            moved = jax.lax.ppermute(y, "stage", [(s, s + 1) for s in range(num_stages - 1)])
            return moved, y

        ticks = jnp.arange(count + num_stages - 1)
        _, tops = jax.lax.scan(tick, jnp.zeros_like(first), ticks)

        def of_one(carry: jax.Array, pair: Any) -> tuple[jax.Array, None]:
            x, target = pair
            return carry + loss(head(params.head, (), x, None)[0], target), None

        total, _ = jax.lax.scan(of_one, jnp.zeros(()), (tops[num_stages - 1 :], targets))
        return jnp.where(stage == num_stages - 1, total / count, 0.0)[None]

    def run(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        whole = PartitionSpec()
        specs = Params(
            jax.tree.map(lambda _: whole, params.stem),
            jax.tree.map(lambda _: PartitionSpec("stage"), params.body),
            jax.tree.map(lambda _: whole, params.head),
        )
        by_stage = jax.shard_map(
            on_stage,
            mesh=mesh,
            in_specs=(specs, whole, whole),
            out_specs=PartitionSpec("stage"),
            check_vma=False,
        )(params, inputs, targets)
        return jnp.sum(by_stage)

    return run
