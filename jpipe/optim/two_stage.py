"""A mean over workers whose messages are compressed both ways, with the errors fed back.

Each worker is also the server of one chunk of the buffer. A worker adds what it failed to say
before, encodes its buffer, and sends each server its chunk; a server decodes and averages what it
got, adds what it failed to say before, encodes the mean, and sends it to all. All decode the same
bytes, so that all have the same numbers. Tang et al., "1-bit Adam", 2021 (arXiv 2102.02888).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpipe.optim.codecs import Codec
from jpipe.optim.fuse import Fused


class Feedback(NamedTuple):
    """Which errors are fed back; without it, what is lost in the encoding stays lost."""

    worker: bool = True
    server: bool = True


BOTH = Feedback()


def two_stage_mean(
    buffer: jax.Array,
    worker_error: jax.Array,
    server_error: jax.Array,
    *,
    layout: Fused,
    codec: Codec,
    axis: str,
    feedback: Feedback = BOTH,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The mean over the devices of a mesh axis; to be called where the axis is manual.

    Args:
        buffer: float32 `[num_blocks, block_size]`, this worker's.
        worker_error: the same shape, what this worker has not said yet.
        server_error: float32 `[num_blocks / workers, block_size]`, what this server has not.
        layout: how arrays lie in the buffer; its `divisor` is the number of workers.
        codec: what a block is on the wire.
        axis: the mesh axis.
        feedback: which errors are fed back.

    Returns:
        The mean, the same bits on all workers, and both errors.
    """
    workers, size = jax.lax.axis_size(axis), layout.block_size
    counts = jnp.asarray(layout.counts)
    own_counts = counts.reshape(workers, -1)[jax.lax.axis_index(axis)]

    def decode(message: jax.Array, counts: jax.Array) -> jax.Array:
        real = jnp.arange(size) < counts[..., None]
        return jnp.where(real, codec.decode(message, size), 0.0)

    corrected = buffer + worker_error if feedback.worker else buffer
    message = codec.encode(corrected, counts)
    if feedback.worker:
        worker_error = corrected - decode(message, counts)
    chunks = message.reshape(workers, -1, message.shape[-1])
    received = jax.lax.all_to_all(chunks, axis, split_axis=0, concat_axis=0)
    mean = decode(received, own_counts).sum(0) / workers
    corrected = mean + server_error if feedback.server else mean
    reply = codec.encode(corrected, own_counts)
    if feedback.server:
        server_error = corrected - decode(reply, own_counts)
    replies = jax.lax.all_gather(reply, axis, tiled=True)
    return decode(replies, counts), worker_error, server_error
