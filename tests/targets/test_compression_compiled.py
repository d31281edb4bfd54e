"""What accelerators make of compressed gradients: bytes, and nothing but bytes, travel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pipeline.hlo import parse

from jpipe.optim import compressed_all_reduce
from jpipe.targets import compiler_options, topology

pytestmark = pytest.mark.targets

PARAMS = {"kernel": (512, 512), "bias": (512,)}
NUMBERS = 512 * 512 + 512


def exchanges(target, method):
    """The collectives of an update, and their results' bytes."""
    devices = topology(target)
    mesh = Mesh(np.array(devices[:4]), ("data",))
    transform = compressed_all_reduce(method, mesh)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in PARAMS.items()}
    over = NamedSharding(mesh, PartitionSpec("data"))

    def laid_out(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=over)

    own = jax.tree.map(lambda a: jax.ShapeDtypeStruct((4, *a.shape), a.dtype), params)
    state = jax.eval_shape(transform.init, params)
    lowered = jax.jit(transform.update).lower(*jax.tree.map(laid_out, (own, state)))
    compiled = lowered.compile(compiler_options=compiler_options(devices[0].platform))
    program = parse(compiled.as_text())
    return [i for i in program.within(program.entry) if i.is_collective]


@pytest.mark.parametrize("target", ["h100", "v5e"])
@pytest.mark.parametrize(
    ("method", "share"), [("bf16", 1 / 2), ("int8", 1 / 3.9), ("onebit", 1 / 25)]
)
def test_two_exchanges_of_bytes(target, method, share):
    found = exchanges(target, method)
    # A TPU may run one exchange in several steps, a chain, beside other work.
    chains = {
        (i.opcode.removesuffix("-start"), *(re.findall(r'chain_id="\d+"', i.text) or [i.name]))
        for i in found
    }
    assert sorted(kind for kind, _ in chains) == ["all-gather", "all-to-all"]
    assert {dtype for i in found for dtype, _ in i.arrays} == {"u8"}
    largest = max(max(np.prod(shape) for _, shape in i.arrays) for i in found)
    assert largest <= share * 4 * NUMBERS * 1.01
