"""The two pipelines that are usually written by hand in JAX; autodiff makes their backward.

Both run all forwards before all backwards, and compute in their bubbles too. Written as well as we
can: only the stage that needs it runs the head, or all of them an equal share.

Shapes: P stages, M microbatches, T = M + P - 1 ticks, B examples, S tokens, D width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import model_jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any
Loss = Callable[[Tree, jax.Array, jax.Array], jax.Array]
"""`(parameters, inputs, targets) -> loss`, differentiable"""

WHOLE, BY_STAGE = PartitionSpec(), PartitionSpec("stage")
SPECS = {"stem": WHOLE, "body": BY_STAGE, "head": WHOLE}
"""How parameters lie; blocks are stacked."""


def gpipe(body: Callable[[Tree, jax.Array], jax.Array], mesh: Mesh) -> Loss:
    """GPipe (Huang et al., 2019, arXiv 1811.06965): a scan that passes activations on."""
    num_stages = mesh.shape["stage"]
    last = num_stages - 1

    def on_stage(params: Tree, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        stage, count = jax.lax.axis_index("stage"), inputs.shape[0]

        def tick(x_BSD: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            entering = model_jax.stem(params["stem"], inputs[jnp.minimum(t, count - 1)])
            y_BSD = body(params["body"], jnp.where(stage == 0, entering, x_BSD))
            moved = jax.lax.ppermute(y_BSD, "stage", [(s, s + 1) for s in range(last)])
            return moved, y_BSD

        start = jnp.zeros_like(model_jax.stem(params["stem"], inputs[0]))
        _, tops_TBSD = jax.lax.scan(tick, start, jnp.arange(count + last))

        def loss_of_all() -> jax.Array:
            def add(total: jax.Array, pair: Any) -> tuple[jax.Array, None]:
                logits = model_jax.head(params["head"], pair[0])
                return total + model_jax.next_token_loss(logits, pair[1]), None

            total, _ = jax.lax.scan(add, jnp.zeros(()), (tops_TBSD[last:], targets))
            return total / count

        return jax.lax.cond(stage == last, loss_of_all, lambda: jnp.zeros(()))[None]

    by_stage = jax.shard_map(
        on_stage, mesh=mesh, in_specs=(SPECS, WHOLE, WHOLE), out_specs=BY_STAGE, check_vma=False
    )
    return lambda *arguments: jnp.sum(by_stage(*arguments))


def shift(body: Callable[[Tree, jax.Array], jax.Array], mesh: Mesh) -> Loss:
    """All stages vmapped over a dim that lies over them, and a roll along it (GSPMD, section 3.3).

    Xu et al., 2021, arXiv 2105.04663. XLA makes the exchange of the roll.
    """
    num_stages = mesh.shape["stage"]
    by_stage = NamedSharding(mesh, BY_STAGE)
    second_by_stage = NamedSharding(mesh, PartitionSpec(None, "stage"))

    def loss(params: Tree, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        count = inputs.shape[0]

        def stacked(leaf: jax.Array) -> jax.Array:
            leaf = leaf.reshape(num_stages, -1, *leaf.shape[1:])
            return jax.lax.with_sharding_constraint(leaf, by_stage)

        blocks = jax.tree.map(stacked, params["body"])

        def tick(x_PBSD: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            entering = model_jax.stem(params["stem"], inputs[jnp.minimum(t, count - 1)])
            x_PBSD = jnp.roll(x_PBSD, 1, axis=0).at[0].set(entering)
            x_PBSD = jax.lax.with_sharding_constraint(x_PBSD, by_stage)
            y_PBSD = jax.lax.with_sharding_constraint(jax.vmap(body)(blocks, x_PBSD), by_stage)
            return y_PBSD, y_PBSD

        first = model_jax.stem(params["stem"], inputs[0])
        start = jnp.zeros((num_stages, *first.shape))
        start = jax.lax.with_sharding_constraint(start, by_stage)
        _, ys_TPBSD = jax.lax.scan(tick, start, jnp.arange(count + num_stages - 1))
        ys_TPBSD = jax.lax.with_sharding_constraint(ys_TPBSD, second_by_stage)
        tops_MBSD = ys_TPBSD[num_stages - 1 :, num_stages - 1]
        if count % num_stages == 0:
            tops_MBSD = jax.lax.with_sharding_constraint(tops_MBSD, by_stage)

        def of_one(x_BSD: jax.Array, targets_BS: jax.Array) -> jax.Array:
            return model_jax.next_token_loss(model_jax.head(params["head"], x_BSD), targets_BS)

        return jnp.mean(jax.vmap(of_one)(tops_MBSD, targets))

    return loss
