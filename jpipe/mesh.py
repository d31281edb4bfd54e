"""Mesh axes, meshes, and devices simulated on the CPU."""

import math
import os
import re
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

STAGE = "stage"
DATA = "data"
MODEL = "model"
AXES = (STAGE, DATA, MODEL)


def parse_mesh(text: str) -> dict[str, int]:
    """Read a mesh as users write it.

    Args:
        text: `4` (stages), `4x2` (stages x data), `2x2x2` (stages x data x model) or
            `stage=4,data=2`.

    Returns:
        The size of each of `AXES`.

    Raises:
        ValueError: if the text is no mesh, a size is below 1, or an axis is unknown.
    """
    grammar = (
        "write 4 (stages), 4x2 (stages x data), 2x2x2 (stages x data x model) or stage=4,data=2"
    )
    if "=" in text:
        pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part) for part in text.split(",")]
        named = [(p[1], int(p[2])) for p in pairs if p]
        if len(named) < len(pairs) or len(dict(named)) < len(named):
            raise ValueError(f"mesh={text!r} is not understood; {grammar}")
    else:
        sizes = text.lower().split("x")
        if not all(re.fullmatch(r"\s*\d+\s*", size) for size in sizes) or len(sizes) > 3:
            raise ValueError(f"mesh={text!r} is not understood; {grammar}")
        named = list(zip(AXES, map(int, sizes), strict=False))
    for axis, size in named:
        if axis not in AXES:
            raise ValueError(f"mesh={text!r} has an unknown axis {axis!r}; {grammar}")
        if size < 1:
            raise ValueError(f"mesh={text!r}: axis {axis!r} must have at least 1 device; {grammar}")
    return {axis: dict(named).get(axis, 1) for axis in AXES}


def make_mesh(
    num_stages: int,
    num_data: int = 1,
    num_model: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Lay devices out over the axes `stage`, `data` and `model`.

    The more two devices have to tell each other, the closer they are in the order of devices: those
    along `model` are neighbours, then come those along `stage`, and `data` is the outer axis.

    Args:
        num_stages: P, size of the `stage` axis.
        num_data: size of the `data` axis.
        num_model: size of the `model` axis.
        devices: the devices to use, at least as many as the mesh has; default `jax.devices()`.

    Raises:
        ValueError: if there are too few devices.
    """
    sizes = {"num_stages": num_stages, "num_data": num_data, "num_model": num_model}
    for argument, value in sizes.items():
        if value < 1:
            raise ValueError(f"{argument}={value} must be at least 1")
    devices = jax.devices() if devices is None else devices
    needed = math.prod(sizes.values())
    if len(devices) < needed:
        raise ValueError(
            f"a mesh of {describe_mesh(sizes.values())} needs {needed} devices, there are "
            f"{len(devices)}; simulate them on the CPU with jpipe.mesh.simulate_devices({needed}) "
            "before JAX is first used"
        )
    grid = np.array(devices[:needed]).reshape(num_data, num_stages, num_model)
    grid = grid.transpose(1, 0, 2)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def describe_mesh(sizes: Iterable[int]) -> str:
    """The sizes of `AXES` in words, such as `4 stages x 2 data`."""
    stages, data, model = sizes
    return f"{stages} stages x {data} data" + (f" x {model} model" if model > 1 else "")


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
