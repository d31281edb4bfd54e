"""Which devices a run uses: accelerators if there are enough, else simulated ones."""

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

import jax

from jpipe.mesh import simulate_devices
from jpipe.processes import connect
from jpipe.train.options import TrainOptions


class Devices(NamedTuple):
    """Devices for a run.

    Attributes:
        devices: as many as were asked for.
        description: what they are, in one line.
    """

    devices: list[jax.Device]
    description: str


def choose_devices(axes: Mapping[str, int], options: TrainOptions) -> Devices:
    """Find devices, and other processes, before anything else touches JAX's backends.

    Args:
        axes: sizes of the mesh.
        options: of the run.

    Raises:
        ValueError: if there are fewer than asked for, or the processes cannot be joined.
    """
    count, platform = math.prod(axes.values()), options.platform
    processes = options.num_processes or 1
    if count % processes:
        raise ValueError(
            f"--mesh {options.mesh}: {count} devices do not divide over --num-processes "
            f"{processes}; use a mesh of {processes} times as many as each process has"
        )
    simulate_devices(count // processes)
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    by_hand = (options.coordinator, options.num_processes, options.process_id)
    if options.distributed and platform == "cpu":
        raise ValueError(
            "--distributed: how many devices to simulate in each process is not known before they "
            "are joined; give --coordinator, --num-processes and --process-id instead"
        )
    if options.distributed or any(value is not None for value in by_hand):
        connect(*by_hand)
    found = _devices_of("cpu" if platform == "cpu" else None if platform == "auto" else platform)
    kind = found[0].platform if found else platform
    if kind != "cpu" and len(found) >= count:
        return Devices(found[:count], f"{count} x {found[0].device_kind} ({kind})")
    if platform in ("gpu", "tpu"):
        raise ValueError(
            f"platform={platform!r}: the mesh needs {count} devices, there are {len(found)}; "
            f"use a smaller --mesh, or --platform cpu to simulate the devices"
        )
    simulated = _devices_of("cpu")
    if len(simulated) < count:
        raise ValueError(
            f"the mesh needs {count} devices, the CPU backend shows {len(simulated)}; "
            + _why_so_few(count)
        )
    if jax.process_count() == 1:
        jax.config.update("jax_default_device", simulated[0])
    have = f"; there is only {len(found)} x {found[0].device_kind}" if kind != "cpu" else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Devices(
        simulated[:count],
        f"{count} {'device' if count == 1 else 'devices'} simulated on the CPU, "
        f"which has {cores} cores{have}"
        + (f", in {jax.process_count()} processes" if jax.process_count() > 1 else ""),
    )


def _why_so_few(count: int) -> str:
    flags, platforms = (os.environ.get(name, "") for name in ("XLA_FLAGS", "JAX_PLATFORMS"))
    if "host_platform_device_count" in flags:
        return f"XLA_FLAGS={flags!r} says how many: raise the number there to {count}"
    if platforms not in ("", "cpu"):
        return f"JAX_PLATFORMS={platforms!r} keeps JAX from it: unset it or use --platform cpu"
    return "it had started before: use a smaller mesh, or a new process"


def _devices_of(platform: str | None) -> list[jax.Device]:
    try:
        return list(jax.devices(platform))
    except (RuntimeError, AssertionError):  # JAX's ways to say that there is no such platform
        return []
