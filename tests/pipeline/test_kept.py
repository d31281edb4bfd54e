"""How much a GPT block keeps between forward and backward: the figure in the README."""

import jax
import jax.numpy as jnp
from flax import nnx
from pipeline.simple_split import split_gradient

from jpipe.models import GPTConfig
from jpipe.models.gpt import Block


def test_a_gpt_block_keeps_a_fraction_of_what_vjp_saves():
    config = GPTConfig(width=256, heads=8, context=128)
    graph, state = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
    params = nnx.to_pure_dict(state)
    x = jax.ShapeDtypeStruct((2, 128, 256), jnp.float32)

    def block(params, x):
        return nnx.merge(graph, nnx.State(params))(x)

    def num_bytes(arrays):
        return sum(a.size * a.dtype.itemsize for a in arrays)

    kept = num_bytes(split_gradient(block, params, x).kept)
    saved = jax.eval_shape(lambda p, x: jax.tree.leaves(jax.vjp(block, p, x)[1]), params, x)
    of_params = num_bytes(a for a in jax.tree.leaves(params) if a.ndim > 1)
    assert kept / num_bytes([x]) < 14.2
    assert (num_bytes(saved) - of_params) / num_bytes([x]) > 49
