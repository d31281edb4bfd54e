"""A bit that flips in what a stage sends, as tests in one process and in several want it.

python -m train.flips 4 -- ARGUMENTS OF THE COMMAND
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.pipeline import executor


def flipping(times, send, stage=0, tick=2):
    """What sends payloads, but flips a bit of a stage's in a tick, the n-th times that it does."""
    count = itertools.count(1)

    def now(of_stage, in_tick):
        return np.bool_(of_stage == stage and in_tick == tick and next(count) in times)

    def wrong(sealed, schedule, num_lanes, beat, row, axis):
        shape = jax.ShapeDtypeStruct((), bool)
        here = jax.pure_callback(now, shape, jax.lax.axis_index(axis), row.tick)
        (payload,), tree = jax.tree.flatten(sealed.payload)
        word = jax.lax.bitcast_convert_type(payload.ravel()[7], jnp.uint32)
        damaged = jax.lax.bitcast_convert_type(word ^ jnp.uint32(1 << 20), payload.dtype)
        damaged = payload.ravel().at[7].set(damaged).reshape(payload.shape)
        payload = jnp.where(here, damaged, payload)
        sealed = sealed._replace(payload=tree.unflatten([payload]))
        return send(sealed, schedule, num_lanes, beat, row, axis)

    return wrong


if __name__ == "__main__":
    from jpipe.train.__main__ import main

    executor.send = flipping([int(sys.argv[1])], executor.send)
    sys.exit(main(sys.argv[3:]))
