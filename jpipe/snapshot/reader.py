"""Snapshots that were written: found by their names, read, and compared with their checksums.

Orbax gives back whatever it finds in its files; so every part of every array has a checksum in a
manifest, which is compared before anything is used.
"""

import dataclasses
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import NDArray

from jpipe.snapshot.leaves import rebuild
from jpipe.snapshot.manifest import FILE, DamageError, Manifest

Tree = Any

ARRAYS = "state"
"""What in a snapshot's folder Orbax writes."""

ASIDE = "~"
"""What the name of a snapshot ends with, once or more often, while another takes its place."""

_NAME = re.compile(rf"step-(\d{{8,}})(?:\+(\d+))?{ASIDE}*")


class SnapshotError(OSError):
    """A snapshot could not be written, or none can be read."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot that was read, and found to be what was written.

    Attributes:
        path: its folder.
        manifest: what it holds.
        arrays: by name, on the host.
    """

    path: Path
    manifest: Manifest
    arrays: Mapping[str, NDArray[Any]]

    def restore(self, state: Tree, prefix: str = "") -> tuple[Tree, list[str]]:
        """The state that was saved, or a part of it, laid out as another is; see `rebuild`.

        Args:
            state: a state of the structure, shapes and shardings that are wanted: arrays, or
                `jax.ShapeDtypeStruct`, which take no memory, see `abstract_train_state`.
            prefix: what the names of the part begin with, such as `['state']`.
        """
        stored, arrays = {}, {}
        for name, leaf in self.manifest.leaves.items():
            if name.startswith(prefix):
                own = dataclasses.replace(
                    leaf.place,
                    name=name.removeprefix(prefix),
                    part=leaf.place.part.removeprefix(prefix),
                )
                stored[own.name], arrays[own.name] = own, self.arrays[name]
        return rebuild(state, stored, arrays)


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot, and compare it with its checksums.

    Args:
        path: its folder.

    Raises:
        DamageError: if anything is missing or differs.
    """
    try:
        manifest = Manifest.from_bytes((path / FILE).read_bytes())
    except FileNotFoundError as error:
        raise DamageError("it has no manifest: it is empty, or half-written") from error
    except OSError as error:
        raise DamageError(f"its manifest cannot be read: {error.strerror}") from error
    restore = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in manifest.leaves}
    # By itself: others may read at other times, or not at all.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=None,
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=f"process{jax.process_index()}",
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
            arrays = checkpointer.restore(
                path.absolute() / ARRAYS, args=ocp.args.PyTreeRestore(restore_args=restore)
            )
    except Exception as error:  # whatever a damaged file makes of Orbax
        raise DamageError(f"its arrays cannot be read: {first_line(error)}") from error
    missing = manifest.leaves.keys() - arrays.keys()
    if missing:
        raise DamageError(f"it has no {sorted(missing)[0]}")
    manifest.check(arrays)
    return Snapshot(path, manifest, arrays)


def snapshot_folders(folder: Path) -> list[Path]:
    """The folders of snapshots in a folder, oldest first; they may be damaged."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (*when_taken(path), -path.name.count(ASIDE)))


def when_taken(path: Path) -> tuple[int, int]:
    """Step and microbatch of a snapshot, by the name of its folder, see `snapshot_folders`."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1]), int(found[2] or 0)


def newest_good(folder: Path) -> Snapshot | None:
    """The newest snapshot that is as it was written; a warning names each that is not.

    Args:
        folder: where the snapshots are.

    Returns:
        The snapshot; None if there is none at all.

    Raises:
        SnapshotError: if there are some, and none is good.
    """
    candidates = snapshot_folders(folder)
    for path in reversed(candidates):
        try:
            return read_snapshot(path)
        except DamageError as error:
            warnings.warn(f"snapshot {path} is damaged and left out: {error}", stacklevel=2)
    if candidates:
        raise SnapshotError(
            f"none of the {len(candidates)} snapshots in {folder} is good; to begin anew, use "
            "another folder, or remove them"
        )
    return None


def folder_name(step: int, microbatch: int) -> str:
    """What the folder of a snapshot is called; the inverse of `when_taken`."""
    return f"step-{step:08d}" + (f"+{microbatch}" if microbatch else "")


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
