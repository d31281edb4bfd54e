"""Payloads that travel with a checksum and an address, so that a reader knows that it has what was
sent, and what was meant for it: an exchange that is lost leaves what came before, intact.
"""

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
    """What travels.

    Attributes:
        payload: the payload.
        crc32: of its bytes; uint32 scalar.
        address: the operation, the microbatch and the virtual stage that are to read it; int32
            `[3]`.
    """

    payload: Tree
    crc32: jax.Array
    address: jax.Array


def seal(payload: Tree, row: Row, last: int) -> Sealed:
    """What a row made, with checksum and address where somebody is to read it, else with zeros.

    Args:
        payload: what it made.
        row: the row.
        last: the last of all virtual stages.
    """
    v, forward, backward = row.virtual, row.op == Op.FORWARD, row.op == Op.BACKWARD

    def sign(_: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return device_crc32(payload), _address(row, jnp.where(forward, v + 1, v - 1))

    travels = (forward & (v < last)) | (backward & (v > 0))
    return Sealed(payload, *when(travels, sign, (jnp.uint32(0), jnp.zeros(3, jnp.int32))))


def first_mismatch(sealed: Sealed, row: Row, last: int, before: Any) -> jax.Array:
    """The first tick in which a stage read something else than what was sent to it.

    Args:
        sealed: what lies ready to be read.
        row: the row, which may read it.
        last: as for `seal`.
        before: the first such tick so far, or `INTACT`; int32 scalar.
    """
    v = row.virtual
    reads = ((row.op == Op.FORWARD) & (v > 0)) | ((row.op == Op.BACKWARD) & (v < last))

    def compare(before: jax.Array) -> jax.Array:
        same = device_crc32(sealed.payload) == sealed.crc32
        same &= jnp.all(sealed.address == _address(row, v))
        return jnp.where(same, before, jnp.minimum(before, row.tick))

    found: jax.Array = when(reads, compare, before)
    return found


def _address(row: Row, v: jax.Array) -> jax.Array:
    return jnp.stack([row.op, row.microbatch, v])


def describe_mismatches(mismatches: Any, schedule: Schedule, mesh: Mesh) -> Iterator[str]:
    """What was damaged on its way, in words; the earliest first.

    Args:
        mismatches: int32 array with a dim for each axis of the mesh, as a verified step returns it:
            for each device the first tick in which it read something else than what was sent.
        schedule: the table that ran.
        mesh: the mesh.

    Raises:
        ValueError: if they are not those of a verified step on this mesh by this table.
    """
    ticks = np.asarray(mismatches)
    if ticks.shape != mesh.devices.shape or not np.issubdtype(ticks.dtype, np.integer):
        raise ValueError(
            f"mismatches={mismatches!r} must be integers of shape {mesh.devices.shape}, as a step "
            "with verify=True returns them"
        )
    for place in sorted(zip(*np.nonzero(ticks != INTACT), strict=True), key=lambda p: ticks[p]):
        tick, at = int(ticks[place]), dict(zip(mesh.axis_names, map(int, place), strict=True))
        stage = at.pop(STAGE)
        if not 0 <= tick < schedule.num_ticks:
            raise ValueError(f"mismatches: the table {schedule.name!r} has no tick {tick}")
        op, v = Op(int(schedule.op[tick, stage])), int(schedule.virtual_stage[tick, stage])
        what = "activations" if op == Op.FORWARD else "gradients"
        source = schedule.source_of(op, v)
        if op not in (Op.FORWARD, Op.BACKWARD) or source is None:
            raise ValueError(
                f"mismatches: in tick {tick} of the table {schedule.name!r} stage {stage} reads "
                "nothing that was sent; give the table that ran"
            )
        others = "".join(f", {axis} {index}" for axis, index in at.items() if mesh.shape[axis] > 1)
        yield (
            f"the {what} of microbatch {schedule.microbatch[tick, stage]} from stage "
            f"{schedule.stage_of(source)} to stage {stage}{others}, read in tick {tick}"
        )
