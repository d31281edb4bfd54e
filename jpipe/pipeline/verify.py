"""Payloads that travel with a checksum, so that what arrives can be compared with what was sent."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpipe.integrity import device_crc32
from jpipe.mesh import STAGE
from jpipe.pipeline.control import when
from jpipe.pipeline.rows import Row
from jpipe.pipeline.stages import Tree
from jpipe.schedule.table import Op, Schedule

INTACT = np.iinfo(np.int32).max
"""In place of a tick: everything that a device read was what had been sent."""


class Sealed(NamedTuple):
    """A payload and the CRC32 of its bytes, a uint32 scalar."""

    payload: Tree
    crc32: jax.Array


def seal(payload: Tree, row: Row, first: jax.Array, last: jax.Array) -> Sealed:
    """What a row made, with its checksum where somebody is to read it, else with 0.

    Args:
        payload: what it made.
        row: the row.
        first: whether it is of the first of all virtual stages.
        last: whether it is of the last.
    """
    travels = ((row.op == Op.FORWARD) & ~last) | ((row.op == Op.BACKWARD) & ~first)
    return Sealed(payload, when(travels, lambda _: device_crc32(payload), jnp.uint32(0)))


def first_mismatch(
    sealed: Sealed, row: Row, first: jax.Array, last: jax.Array, before: Any
) -> jax.Array:
    """The first tick in which a stage read something else than what was sent.

    Args:
        sealed: what lies ready to be read.
        row: the row, which may read it.
        first: as for `seal`.
        last: as for `seal`.
        before: the first such tick so far, or `INTACT`; int32 scalar.
    """
    reads = ((row.op == Op.FORWARD) & ~first) | ((row.op == Op.BACKWARD) & ~last)

    def compare(before: jax.Array) -> jax.Array:
        same = device_crc32(sealed.payload) == sealed.crc32
        return jnp.where(same, before, jnp.minimum(before, row.tick))

    found: jax.Array = when(reads, compare, before)
    return found


def describe_mismatches(mismatches: Any, schedule: Schedule, mesh: Mesh) -> Iterator[str]:
    """What was damaged on its way, in words; the earliest first.

    Args:
        mismatches: int32 array with a dim for each axis of the mesh, as a verified step returns it:
            for each device the first tick in which it read something else than what was sent.
        schedule: the table that ran.
        mesh: the mesh.
    """
    ticks = np.asarray(mismatches)
    for place in sorted(zip(*np.nonzero(ticks != INTACT), strict=True), key=lambda p: ticks[p]):
        tick, at = int(ticks[place]), dict(zip(mesh.axis_names, map(int, place), strict=True))
        stage = at.pop(STAGE)
        op, v = Op(int(schedule.op[tick, stage])), int(schedule.virtual_stage[tick, stage])
        what = "activations" if op == Op.FORWARD else "gradients"
        source = schedule.source_of(op, v)
        assert source is not None, "the first of all stages reads nothing that was sent"
        others = "".join(f", {axis} {index}" for axis, index in at.items() if mesh.shape[axis] > 1)
        yield (
            f"the {what} of microbatch {schedule.microbatch[tick, stage]} from stage "
            f"{source % schedule.num_stages} to stage {stage}{others}, read in tick {tick}"
        )
