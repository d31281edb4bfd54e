"""A bit that flips in what stage 0 sends, as tests in one process and in several want it.

python -m train.flips 4 -- ARGUMENTS OF THE COMMAND
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.pipeline import executor


def flipping(times):
    """What sends payloads, but flips a bit of stage 0's in tick 2, the n-th times that it does."""
    count, send = itertools.count(1), executor.send

    def now(stage, tick):
        return np.bool_(stage == 0 and tick == 2 and next(count) in times)

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

    executor.send = flipping([int(sys.argv[1])])
    sys.exit(main(sys.argv[3:]))
