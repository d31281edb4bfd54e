"""The folder a run writes to. Nothing in it is ever half-written."""

import errno
import fcntl
import itertools
import json
import os
import time
import warnings
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from jpipe.files import write_atomically

_METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
"""What a run writes last: with it, it is finished."""


class RunFolder:
    """A folder with config.json, metrics.jsonl and whatever else a run leaves.

    Args:
        path: the folder; None for a new one below `runs/`.
        name: what a new folder's name begins with.
        config: content of config.json, which is written at once.
        writable: False in processes that leave writing to another; they make no folder.
        goes_on: whether it may hold a run, to go on with.

    Raises:
        ValueError: if it cannot be written, or holds the metrics of another run.
    """

    def __init__(
        self,
        path: str | None,
        name: str,
        config: Mapping[str, Any],
        *,
        writable: bool = True,
        goes_on: bool = False,
    ) -> None:
        self._metrics: FileIO | None = None
        self._lock: int | None = None
        self.writable = writable
        if not writable:
            self.path = Path(path or "runs").expanduser()
            return
        self.path = Path(path).expanduser() if path else new_folder(name)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
            if not goes_on and holds_run(self.path):
                raise ValueError(
                    f"--out {self.path} already holds a run; choose another folder or remove it"
                )
            self.write_json("config.json", config)
        except OSError as error:
            raise ValueError(
                f"--out {self.path} cannot be written ({error.strerror}); choose a folder that can"
            ) from error

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Leave in metrics.jsonl what comes before a snapshot, and begin a new end.

        If that leaves nothing, the file is set aside under another name.

        Args:
            step: steps made before the snapshot; 0 to begin anew.

        Returns:
            The lines that stay, a dict for each step; without any that is half-written.
        """
        if not self.writable:
            return []
        (self.path / SUMMARY).unlink(missing_ok=True)
        try:
            lines = (self.path / _METRICS).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        rows = [row for row in map(_row, lines) if row is not None and row["step"] <= step]
        steps = [row["step"] for row in rows]
        if steps and steps != list(range(steps[0], step + 1)):
            warnings.warn(
                f"{self.path / _METRICS} does not have each step up to {step} once: it was damaged",
                stacklevel=2,
            )
        if rows:
            self.write(_METRICS, b"".join(_line(row) for row in rows))
        else:
            aside = (self.path / f"metrics-before-{k}.jsonl" for k in itertools.count(1))
            os.replace(self.path / _METRICS, next(p for p in aside if not p.exists()))
        return rows

    def write(self, name: str, content: bytes) -> None:
        """Write a file as a whole: it is there with all its content, or as it was before."""
        if self.writable:
            write_atomically(self.path / name, content)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file as a whole."""
        self.write(name, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add one line to metrics.jsonl; it has left the process when this returns."""
        if not self.writable:
            return
        if self._metrics is None:
            self._metrics = (self.path / _METRICS).open("ab", buffering=0)
        before = self._metrics.tell()
        line = _line(metrics)
        try:
            if self._metrics.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._metrics.truncate(before)  # no half a line
            raise

    def sync(self) -> None:
        """Let nothing of metrics.jsonl wait in the operating system's memory."""
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())

    def close(self) -> None:
        """Close metrics.jsonl, and let others write to the folder."""
        if self._metrics is not None:
            self._metrics.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def holds_run(path: Path) -> bool:
    """Whether a folder holds what a run leaves."""
    return any((path / mark).exists() for mark in (_METRICS, SUMMARY, "snapshots"))


def _lock(path: Path) -> int:
    """A hold on a folder, which ends with the process at the latest.

    Raises:
        ValueError: if another has it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(
            f"--out {path} is being written by another process; choose another folder"
        ) from error
    except OSError:  # a file system without locks
        return descriptor
    return descriptor


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is not whole."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _line(metrics: Mapping[str, Any]) -> bytes:
    return (json.dumps(metrics, allow_nan=False) + "\n").encode()


def new_folder(name: str) -> Path:
    """A folder below `runs/` with a name of its own, made right here."""
    path = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in itertools.chain([""], (f"-{k}" for k in itertools.count(2))):
        try:
            Path(path + suffix).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # said by whoever writes to it
            break
        return Path(path + suffix)
    return Path(path)
