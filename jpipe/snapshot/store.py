"""Snapshots in a folder: written by Orbax in the background, there as a whole or not at all.

Orbax writes the arrays; beside them lies a manifest with the checksum of every part of each.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jpipe.files import write_atomically
from jpipe.processes import anywhere
from jpipe.snapshot.leaves import places, raw
from jpipe.snapshot.manifest import (
    FILE,
    Copies,
    Manifest,
    checked,
    copy_shards,
    merge,
)
from jpipe.snapshot.reader import (
    ARRAYS,
    ASIDE,
    SnapshotError,
    first_line,
    folder_name,
    snapshot_folders,
    when_taken,
)

Tree = Any

_WRITING, _DELETED = ".writing-", ".deleted-"
_PATIENCE = 600.0  # seconds that processes wait for each other's part of a snapshot


class SnapshotStore:
    """Writes snapshots to a folder, one at a time, while training goes on.

    All processes of a run make one, with the same folder, and call its methods alike; the folder
    must be one that all of them see.

    Args:
        folder: where the snapshots are.
        keep_last: how many of the newest stay.
        keep_every: of the others those between steps stay whose step is a multiple of this; None
            for none.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(self, folder: Path, *, keep_last: int = 3, keep_every: int | None = None) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last} must be at least 1")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every={keep_every} must be at least 1, or None")
        self.folder, self._keep_last, self._keep_every = folder, keep_last, keep_every
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        if jax.process_index() == 0:
            for path in folder.glob(".*"):
                if path.name.startswith((_WRITING, _DELETED)):
                    shutil.rmtree(path, ignore_errors=True)

    def save(
        self, state: Tree, step: int, extra: Mapping[str, Any], *, microbatch: int = 0
    ) -> float:
        """Begin to write a snapshot. Afterwards the state may be donated.

        Args:
            state: pytree of arrays.
            step: steps made before it.
            extra: what else belongs to it, fit for JSON.
            microbatch: of the step after that, about so many microbatches are finished.

        Returns:
            Seconds that the caller had to wait.

        Raises:
            SnapshotError: if this snapshot cannot be begun, or the one before was not finished.
            ValueError: if there is nothing to save, or what is no `jax.Array`.
        """
        started = time.perf_counter()
        if step < 0 or microbatch < 0:
            raise ValueError(f"step={step} and microbatch={microbatch} must not be negative")
        extra = json.loads(json.dumps(extra, allow_nan=False))  # as it is now
        self.wait()
        arrays = {
            place.name: (place, raw(leaf))
            for place, leaf in zip(places(state), _leaves(state), strict=True)
            if leaf.size
        }
        if not arrays:
            raise ValueError("state holds no numbers; there is nothing to save")
        name = folder_name(step, microbatch)
        partial = self.folder / f"{_WRITING}{name}"
        failed: OSError | None = None
        if jax.process_index() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
            except OSError as error:
                failed = error
        if anywhere(failed is not None)[0]:  # or others would wait in Orbax
            raise SnapshotError(_failed(name, failed or OSError("process 0 made no folder")))
        try:
            copies = [(place, copy_shards(array)) for place, array in arrays.values()]
            self._checkpointer.save(
                partial.absolute() / ARRAYS,
                args=ocp.args.PyTreeSave({name: array for name, (_, array) in arrays.items()}),
            )
        except Exception as error:
            self._discard(partial)
            raise SnapshotError(_failed(name, error)) from error
        manifest = Manifest(step, microbatch, {}, extra)
        self._thread = threading.Thread(
            target=self._finish, args=(partial, manifest, copies), name=f"snapshot {name}"
        )
        self._thread.start()
        return time.perf_counter() - started

    def poll(self) -> None:
        """Say what went wrong in the background, if anything did; does not wait.

        Raises:
            SnapshotError: once, if a snapshot could not be written. Those before are still there.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait for the snapshot that is being written.

        Raises:
            SnapshotError: as `poll`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()

    def close(self) -> None:
        """Wait, and let go of what writes.

        Raises:
            SnapshotError: as `poll`.
        """
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # of a snapshot that failed, which was said
                self._checkpointer.close()

    def forget_after(self, step: int, microbatch: int) -> None:
        """Remove the snapshots after one from which a run goes on: they are of another life.

        Args:
            step: steps made before that one.
            microbatch: about so many microbatches of the next were finished.
        """
        if jax.process_index() == 0:
            for path in snapshot_folders(self.folder):
                if when_taken(path) > (step, microbatch):
                    self._remove(path)

    def _finish(self, partial: Path, manifest: Manifest, copies: Copies) -> None:
        """In the background: checksums, the rest of the arrays, and then the snapshot's name."""
        try:
            leaves = {leaf.place.name: leaf for leaf in checked(copies)}
            copies.clear()
            own = dataclasses.replace(manifest, leaves=leaves)
            write_atomically(_part(partial, jax.process_index()), own.to_bytes())
            self._checkpointer.wait_until_finished()
            final = self.folder / partial.name.removeprefix(_WRITING)
            if jax.process_index() == 0:
                self._commit(partial, final, manifest)
            else:
                _wait(lambda: not partial.exists(), "process 0 to finish")
                if not final.exists():
                    raise OSError("another process could not write its part")
        except BaseException as error:  # to be raised where somebody sees it
            with contextlib.suppress(Exception):
                self._checkpointer.wait_until_finished()  # it may still be writing
            self._discard(partial)
            self._error = SnapshotError(_failed(partial.name.removeprefix(_WRITING), error))
            return
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # the next snapshot will try again
                self._retire(final)

    def _commit(self, partial: Path, final: Path, manifest: Manifest) -> None:
        parts = []
        for process in range(jax.process_count()):
            part = _part(partial, process)

            def settled(part: Path = part) -> bool:
                return part.exists() or not partial.exists()

            _wait(settled, f"process {process}'s part")
            if not part.exists():
                raise OSError(f"process {process} could not write its part")
            parts.append(Manifest.from_bytes(part.read_bytes()).leaves)
            part.unlink()
        whole = dataclasses.replace(manifest, leaves=merge(parts))
        write_atomically(partial / FILE, whole.to_bytes())
        _sync(partial)
        aside = final
        while aside.exists():  # of an earlier run to the same step, and perhaps damaged
            aside = aside.with_name(aside.name + ASIDE)
        if aside != final:
            os.replace(final, aside)  # where it is still found, should this process die here
        os.replace(partial, final)
        _sync_one(self.folder)
        for path in self.folder.glob(f"{final.name}{ASIDE}*"):
            with contextlib.suppress(OSError):  # it only takes room
                self._remove(path)

    def _retire(self, newest: Path) -> None:
        """Remove what is not to be kept; each vanishes at once."""
        for path in snapshot_folders(self.folder)[: -self._keep_last]:
            step, microbatch = when_taken(path)
            if path == newest:
                continue
            if microbatch or self._keep_every is None or step % self._keep_every:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        gone = path.with_name(f"{_DELETED}{path.name}")
        os.replace(path, gone)
        _sync_one(self.folder)
        shutil.rmtree(gone)

    def _discard(self, partial: Path) -> None:
        """Remove what failed, whereby the other processes know that it did."""
        gone = partial.with_name(f"{_DELETED}{jax.process_index()}-{partial.name}")
        with contextlib.suppress(OSError):  # others may be about it, too
            os.replace(partial, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _part(partial: Path, process: int) -> Path:
    return partial / f"{process}-{FILE}"


def _wait(done: Callable[[], bool], what: str) -> None:
    """Until another process has done its share."""
    deadline = time.monotonic() + _PATIENCE
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_PATIENCE:.0f} s for {what}")
        time.sleep(0.01)


def _sync(folder: Path) -> None:
    """Let nothing of a folder wait in the operating system's memory."""
    for path in (*folder.rglob("*"), folder):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _leaves(state: Tree) -> Iterator[jax.Array]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} is a {type(leaf).__name__}; make it a "
                "jax.Array, or put it into extra"
            )
        yield leaf


def _failed(name: str, error: BaseException) -> str:
    return f"the snapshot {name} could not be written: {first_line(error)}"
