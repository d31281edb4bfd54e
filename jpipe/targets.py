"""Accelerators to compile for without having them, and the XLA options that jpipe recommends.

What XLA makes of a pipeline decides whether exchanges overlap with computation and whether buffers
are copied. Compiling for a target shows that on any machine; nothing here runs a program. What was
seen with and without each option stands in docs/xla.md.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

import jax
from jax.experimental import topologies

NUM_DEVICES = 4
"""Devices of a target."""


class _Tpu(NamedTuple):
    topology: str
    accelerator: str


_GPUS = ("a100", "h100")
_TPUS = {
    "v5e": _Tpu("v5e:2x2", "v5litepod-4"),
    "v5p": _Tpu("v5p:2x2x1", "v5p-8"),
}
TARGETS = (*_GPUS, *_TPUS)
"""Names of the targets: A100 and H100 with NVLink, TPU v5e and v5p."""

_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

_OPTIONS: dict[str, dict[str, str | bool]] = {
    "gpu": {
        # Computation between start and done of an exchange. XLA does so by itself for H100, and not
        # for A100, where an exchange would else have nothing to hide behind.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # From how many operations in a row on XLA makes a CUDA graph of them. Outside of a graph
        # the host waits for the predicate of each conditional; with the default of 5 that befalls
        # the backwards of 1f1b-overlap, four conditionals between two exchanges.
        "xla_gpu_graph_min_graph_size": "1",
    },
}


def topology(name: str) -> list[jax.Device]:
    """Four devices of one host that exist only for the compiler.

    A mesh over them, or shardings on such a mesh, make `jitted.lower(...).compile()` compile for
    the target. It can show its text and memory, but not run.

    Args:
        name: one of `TARGETS`.

    Raises:
        ValueError: if there is no such target, or the package that compiles for it is missing or
            could not be loaded.
    """
    if name not in TARGETS:
        raise ValueError(f"name={name!r} is no target; choose from {', '.join(TARGETS)}")
    if name in _GPUS:
        _require(_CUDA_PLUGINS, name, "jax[cuda12-local]")
        description = resources.files("jpipe").joinpath("gpus", f"{name}.txtpb").read_text()
        try:
            found = topologies.get_topology_desc(
                platform="cuda", target_config=description, topology=f"1x1x{NUM_DEVICES}"
            )
        except NotImplementedError as error:
            # JAX looks for CUDA libraries before it loads the plugin, unless told not to use it.
            raise ValueError(
                f"name={name!r}: JAX found the compiler's package but did not load it, which it "
                "does not without CUDA libraries; set the environment variable JAX_PLATFORMS=cpu "
                "before the program starts, with which it does not look for them"
            ) from error
        return list(found.devices)
    _require(("libtpu",), name, "jax[tpu]")
    tpu = _TPUS[name]
    # libtpu asks these instead of the cloud's metadata server, which only a TPU's host can reach.
    with _environment(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=tpu.accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    ):
        found = topologies.get_topology_desc(tpu.topology, platform="tpu")
    return list(found.devices)


def compiler_options(platform: str) -> dict[str, str | bool]:
    """What to pass to `lowered.compile(compiler_options=...)`; docs/xla.md says why.

    What the user set in `XLA_FLAGS` is left out, so that it holds.

    Args:
        platform: of the devices, such as `gpu`, `tpu` or `cpu`.

    Returns:
        Values by the name of the option; empty where XLA's defaults are right, as on TPUs and CPUs.
    """
    flags = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    options = _OPTIONS.get(platform, {})
    return {name: value for name, value in options.items() if f"--{name}" not in flags}


def _require(modules: tuple[str, ...], name: str, package: str) -> None:
    if not any(importlib.util.find_spec(module) for module in modules):
        raise ValueError(
            f"name={name!r}: the compiler for it is not installed; pip install '{package}', or "
            "'jpipe[targets]' for all targets"
        )


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
