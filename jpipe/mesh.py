"""Mesh axes, meshes, and devices simulated on the CPU."""

import os
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

STAGE = "stage"
DATA = "data"
MODEL = "model"
AXES = (STAGE, DATA)


def parse_mesh(text: str) -> dict[str, int]:
    """Read a mesh as users write it.

    Args:
        text: `4` (stages), `4x2` (stages x data) or `stage=4,data=2`.

    Returns:
        The size of each of `AXES`.

    Raises:
        ValueError: if the text is no mesh, a size is below 1, or an axis is unknown.
    """
    grammar = "write 4 (stages), 4x2 (stages x data) or stage=4,data=2"
    if "=" in text:
        pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part) for part in text.split(",")]
        named = [(p[1], int(p[2])) for p in pairs if p]
        if len(named) < len(pairs) or len(dict(named)) < len(named):
            raise ValueError(f"mesh={text!r} is not understood; {grammar}")
    else:
        sizes = text.lower().split("x")
        if not all(re.fullmatch(r"\s*\d+\s*", size) for size in sizes) or len(sizes) > 3:
            raise ValueError(f"mesh={text!r} is not understood; {grammar}")
        named = list(zip((STAGE, DATA, MODEL), map(int, sizes), strict=False))
    for axis, size in named:
        if axis == MODEL:
            raise ValueError(
                f"mesh={text!r} asks for a {MODEL!r} axis, which is not supported yet; "
                f"use only {STAGE!r} and {DATA!r}, e.g. {STAGE}=4,{DATA}=2"
            )
        if axis not in AXES:
            raise ValueError(f"mesh={text!r} has an unknown axis {axis!r}; {grammar}")
        if size < 1:
            raise ValueError(f"mesh={text!r}: axis {axis!r} must have at least 1 device; {grammar}")
    return {axis: dict(named).get(axis, 1) for axis in AXES}


def make_mesh(
    num_stages: int, num_data: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Lay devices out over the axes `stage` and `data`.

    Neighbouring stages get neighbouring devices: `stage` is the inner axis of the device order.

    Args:
        num_stages: P, size of the `stage` axis.
        num_data: size of the `data` axis.
        devices: the devices to use, at least `num_stages * num_data`; default `jax.devices()`.

    Raises:
        ValueError: if there are too few devices.
    """
    for argument, value in (("num_stages", num_stages), ("num_data", num_data)):
        if value < 1:
            raise ValueError(f"{argument}={value} must be at least 1")
    devices = jax.devices() if devices is None else devices
    needed = num_stages * num_data
    if len(devices) < needed:
        raise ValueError(
            f"a mesh of {num_stages} stages x {num_data} data needs {needed} devices, there are "
            f"{len(devices)}; simulate them on the CPU with jpipe.mesh.simulate_devices({needed}) "
            "before JAX is first used"
        )
    grid = np.array(devices[:needed]).reshape(num_data, num_stages).T
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def has_explicit_axes(mesh: Mesh) -> bool:
    """Whether JAX wants to be told how arrays move on this mesh; `jax.make_mesh` makes such."""
    return AxisType.Explicit in mesh.axis_types


def simulate_devices(count: int) -> None:
    """Make the CPU backend show `count` devices, or more if it already does.

    To be called before JAX first touches its backends. A device count that the user set in
    `XLA_FLAGS` is respected.

    Args:
        count: number of devices, at least 1.
    """
    if "--xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    before: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", max(count, before))
    except RuntimeError:  # the backends have started; make_mesh will say if devices are too few
        return
