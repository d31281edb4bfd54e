"""Several processes that run one program together, each with devices of its own."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.mesh import DATA
from jpipe.watchdog import APART

Tree = Any

_MOMENT = 5.0  # seconds


class JoinError(RuntimeError):
    """Other processes cannot be reached."""


def connect(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes; to be called before JAX first touches its backends.

    Args:
        coordinator: `host:port` of process 0; None to let JAX find out, which it can on SLURM, Open
            MPI, Kubernetes and cloud TPUs.
        num_processes: how many there are.
        process_id: which of them this one is, from 0.

    Raises:
        ValueError: if the arguments do not fit, or JAX cannot find out.
        JoinError: if the others cannot be reached.
    """
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    if any(v is None for v in given.values()) and any(v is not None for v in given.values()):
        missing = " and ".join(name for name, value in given.items() if value is None)
        raise ValueError(
            f"{missing} missing: give coordinator, num_processes and process_id together, or none"
        )
    if num_processes is not None and process_id is not None:
        if num_processes < 1 or not 0 <= process_id < num_processes:
            raise ValueError(
                f"process_id={process_id} must lie between 0 and num_processes - 1 = "
                f"{num_processes - 1}"
            )
        host, _, port = (coordinator or "").rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"coordinator={coordinator!r} must be host:port, as in node0:7777")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Else JAX takes SIGTERM for itself, and the process does not end.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=int(APART),
            shutdown_timeout_seconds=int(APART),
        )
    except ValueError as error:
        raise ValueError(
            f"the processes cannot be joined ({error}); give coordinator, num_processes and "
            "process_id"
        ) from error
    except RuntimeError as error:
        raise JoinError(f"the processes cannot be joined: {error}") from error
    # While all are in step: where processes meet for the first time, gloo waits for 30 s at most.
    anywhere(False)


def is_joined() -> bool:
    """Whether this process has joined others."""
    return jax.distributed.is_initialized()


def leave(status: int) -> NoReturn:
    """End this process at once, with a status that says that something is wrong.

    JAX lets processes end together, and so would wait for others that may wait for this one. They
    abort when the first process has gone, so it gives those a moment that end as well.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if is_main():
        time.sleep(_MOMENT)
    os._exit(status)


def is_main() -> bool:
    """Whether this process is the one that writes and reports."""
    return jax.process_index() == 0


def of_main(make: Callable[[], str]) -> str:
    """What the process that writes and reports makes of it; all processes must call it.

    Args:
        make: is called in that process only.

    Returns:
        Its text, cut to 4 kB, in every process.

    Raises:
        ValueError, OSError: in every process, if `make` raised one: nobody is left waiting.
    """
    if jax.process_count() == 1:
        return make()
    text = b""
    if is_main():
        try:
            text = b"+" + make().encode()
        except (ValueError, OSError) as error:
            kind = b"v" if isinstance(error, ValueError) else b"o"
            text = kind + str(error).encode()
    letters = np.zeros(4096, np.uint8)
    written = np.frombuffer(text[: len(letters)], np.uint8)
    letters[: len(written)] = written
    with _reaching_others():
        sent = np.asarray(multihost_utils.broadcast_one_to_all(letters))
    received = bytes(sent).rstrip(b"\0")
    told = received[1:].decode(errors="ignore")
    if received[:1] != b"+":
        raise (ValueError if received[:1] == b"v" else OSError)(told)
    return told


def anywhere(*flags: bool) -> tuple[bool, ...]:
    """For each flag whether it is set in any process; all processes must call it."""
    if jax.process_count() == 1:
        return flags
    with _reaching_others():
        gathered = np.asarray(multihost_utils.process_allgather(np.array(flags)))
    return tuple(bool(column.any()) for column in gathered.T)


@contextlib.contextmanager
def _reaching_others() -> Iterator[None]:
    """JAX has a ValueError for an exchange that fails, too: that is no bad input."""
    try:
        yield
    except ValueError as error:
        raise JoinError(f"an exchange between processes failed: {error}") from error


def own_rows(mesh: Mesh, microbatch_size: int) -> range:
    """Which examples of a microbatch the devices of this process need.

    Args:
        mesh: the mesh.
        microbatch_size: examples of a microbatch, over all devices.

    Raises:
        ValueError: if this process has no device of the mesh, or the examples it needs do not
            follow each other.
    """
    axis = mesh.axis_names.index(DATA)
    mine = np.vectorize(lambda d: d.process_index == jax.process_index())(mesh.devices)
    places = np.unique(np.nonzero(mine)[axis])
    if not len(places):
        raise ValueError(
            f"process {jax.process_index()} has no device of the mesh {dict(mesh.shape)}; use a "
            "mesh over all devices, or fewer processes"
        )
    if places[-1] - places[0] + 1 != len(places):
        raise ValueError(
            f"the devices of process {jax.process_index()} are not neighbours along {DATA!r}; make "
            "the mesh with jpipe.mesh.make_mesh"
        )
    share = microbatch_size // mesh.shape[DATA]
    return range(int(places[0]) * share, (int(places[-1]) + 1) * share)


def place_batch(mesh: Mesh, batch: Tree, microbatch_size: int) -> Tree:
    """Arrays on all devices of the mesh, of what each process has read.

    Args:
        mesh: the mesh.
        batch: pytree of `[M, rows of this process, ...]` arrays, see `own_rows`.
        microbatch_size: examples of a microbatch, over all devices.

    Returns:
        The same of `[M, microbatch, ...]` arrays.
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, DATA))

    def place(rows: Any) -> jax.Array:
        shape = (rows.shape[0], microbatch_size, *rows.shape[2:])
        return jax.make_array_from_process_local_data(sharding, np.asarray(rows), shape)

    return jax.tree.map(place, batch)


def to_host(tree: Tree) -> Tree:
    """Arrays as NumPy arrays, in every process, wherever they lie; all processes must call it."""

    def fetch(array: Any) -> Any:
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            return np.asarray(array)
        if array.is_fully_replicated:
            return np.asarray(array.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    return jax.tree.map(fetch, tree)
