"""What the stash costs: the writes and reads of a step alone, beside the step's CPU time.

    python experiments/overhead/stash.py [--microbatches 8] [--rounds 20]

A stage writes what a microbatch leaves between forward and backward into a slot of its stash, and
reads it again later. Autodiff within one program has no such buffer: what a forward makes is there
when the backward wants it. Here the same arrays are copied into slots and out of them, as often as
in a step of `measure.py`, with nothing else to do. Prints JSON.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
from flax import nnx
from measure import CONFIG, MICROBATCH, STAGES, make_model

from jpipe.pipeline import Recompute, stash
from jpipe.pipeline.residuals import split_gradient


def kept(recompute: Recompute) -> list[jax.ShapeDtypeStruct]:
    """What one microbatch leaves on one stage."""
    model = make_model(recompute)
    params = jax.eval_shape(model.init, nnx.Rngs(0))
    own = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((a.shape[0] // STAGES, *a.shape[1:]), a.dtype), params.body
    )
    x = jax.ShapeDtypeStruct((MICROBATCH, CONFIG.context, CONFIG.width), jnp.float32)
    body = model.stages.parts.body
    return split_gradient(lambda p, _, x, __: body(p, (), x, None), own, (), x, ()).kept


def seconds(arrays: list[jax.ShapeDtypeStruct], copies: int, rounds: int) -> float:
    """CPU time of so many copies of the arrays into slots, and out of them."""

    def turn(carry: tuple[list, list], slot: jax.Array) -> tuple[tuple[list, list], None]:
        buffers, contents = carry
        buffers = stash.write(buffers, slot, contents)
        # A barrier, for XLA not to see that this is what was written.
        return jax.lax.optimization_barrier((buffers, stash.read(buffers, slot))), None

    @jax.jit
    def all_turns(contents: list[jax.Array]) -> list[jax.Array]:
        slots = jnp.arange(copies) % STAGES
        (_, contents), _ = jax.lax.scan(turn, (stash.empty(STAGES, contents), contents), slots)
        return contents

    contents = [jnp.ones(a.shape, a.dtype) for a in arrays]
    took = []
    for _ in range(rounds + 1):
        started = time.process_time()
        jax.block_until_ready(all_turns(contents))
        took.append(time.process_time() - started)
    return statistics.median(took[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    for recompute in ("none", "stage"):
        arrays = kept(recompute)
        size = sum(a.size * a.dtype.itemsize for a in arrays)
        row = {
            "recompute": recompute,
            "kept_by_stage_and_microbatch_megabytes": round(size / 1e6, 1),
            "copied_in_a_step_megabytes": round(2 * size * STAGES * args.microbatches / 1e6),
            "cpu_seconds": round(seconds(arrays, STAGES * args.microbatches, args.rounds), 4),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
