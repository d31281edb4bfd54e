"""Meshes of replicas alone, and what a NumPy model of the compression makes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIZES = [1, 2, 3, 8]

PARAMS = {  # sizes that nothing divides, one below a block, one of several, none at all
    "scalar": jnp.ones(()),
    "vector": jnp.ones(300),
    "matrix": jnp.ones((13, 41)),
    "stack": jnp.ones((2, 40, 24)),
    "nothing": jnp.ones((0, 3)),
}


def replicas(count):
    return Mesh(np.array(jax.devices()[:count]), ("data",))


def waiting(function, **settings):
    """Jitted, and done when it returns: simulated devices stall with several calls in flight."""
    jitted = jax.jit(function, **settings)
    return lambda *args: jax.block_until_ready(jitted(*args))


def draw(rng, count, params=PARAMS, mean=0.1):
    """What each replica has: noise of different size in each leaf."""
    return {
        name: jnp.asarray(
            10.0 ** (-k) * (rng.normal(size=(count, *p.shape)) + mean), dtype=jnp.float32
        )
        for k, (name, p) in enumerate(params.items())
    }


def over(mesh, tree, specs=None):
    """The same, with each replica's part on its device."""
    if specs is None:
        return jax.device_put(tree, NamedSharding(mesh, PartitionSpec("data")))
    return jax.tree.map(
        lambda a, s: jax.device_put(a, NamedSharding(mesh, PartitionSpec("data", *s))), tree, specs
    )


class NumPyOneBit:
    """Algorithm 1 of Tang et al. for one vector that fits one block of each server.

    Args:
        size: d.
        count: workers, each the server of a chunk of whole blocks.
        block: numbers that share a scale.
    """

    def __init__(self, size, count, block):
        blocks = -(-size // block)
        self.blocks = -(-blocks // count) * count
        self.block, self.size, self.count = block, size, count
        self.real = (np.arange(self.blocks * block) < size).reshape(self.blocks, block)
        self.worker = np.zeros((count, self.blocks, block))
        self.server = np.zeros((self.blocks, block))

    def compress(self, blocks):
        sizes = np.maximum(self.real.sum(-1, keepdims=True), 1)
        scale = np.sqrt((blocks**2).sum(-1, keepdims=True) / sizes)
        return np.where(self.real, np.where(blocks >= 0, scale, -scale), 0.0)

    def mean(self, vectors):
        """Of `[count, size]`, one for each worker."""
        padded = np.zeros((self.count, self.blocks * self.block))
        padded[:, : self.size] = vectors
        corrected = padded.reshape(self.count, self.blocks, self.block) + self.worker
        said = np.stack([self.compress(c) for c in corrected])
        self.worker = corrected - said
        total = said.mean(0) + self.server
        answer = self.compress(total)
        self.server = total - answer
        return answer.ravel()[: self.size]
