"""What lives on a device from step to step, of a model that no test could hold."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jpipe.adapters import pipeline_from_nnx
from jpipe.mesh import make_mesh
from jpipe.models import GPT, GPTConfig
from jpipe.train_step import abstract_train_state

CONFIGS = {
    "stacked": {"layers": 16},
    "uneven": {"layers": 17},
    "tied": {"layers": 18, "tied": True},
}


def bytes_of(leaf, shape):
    return int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quarter_of_a_billion_parameters_on_each_of_four_devices(name):
    """Stem and head of a vocabulary of 50,304 included; nothing is held four times."""
    config = GPTConfig(vocab_size=50304, context=1024, width=2048, heads=16, **CONFIGS[name])
    settings = {}
    if config.layers % 4:
        inputs = jax.ShapeDtypeStruct((1, 1024), np.int32)
        settings = {"num_stages": 4, "inputs": inputs}
    pipe = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs),
        stem="embedding",
        body="blocks",
        head="head",
        **settings,
    )
    state = abstract_train_state(lambda: pipe.init(nnx.Rngs(0)), optax.adamw(1e-3), make_mesh(4))
    leaves = jax.tree.leaves(state)
    total = sum(bytes_of(leaf, leaf.shape) for leaf in leaves)
    own = sum(bytes_of(leaf, leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    assert 0.95e9 < total / 12 < 1.1e9  # parameter and two moments in float32
    assert own <= 1.01 * total / 4
