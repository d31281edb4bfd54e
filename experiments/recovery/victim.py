"""A run of the command as a process that can be watched, and killed."""

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

MICROBATCHES, BATCH, CONTEXT = 16, 64, 64
ARGUMENTS = f"""
--mesh 4 --platform cpu --layers 4 --width 96 --heads 4 --context {CONTEXT} --batch-size {BATCH}
--microbatches {MICROBATCHES} --eval-every 0 --keep-snapshots 3
""".split()
_GOES_ON = re.compile(r"going on .*/step-(\d+)(?:\+(\d+))?")


class Victim:
    """Starts the command.

    Args:
        folder: its run folder.
        arguments: beside `ARGUMENTS`.
        step_seconds: how long a step takes, to tell how far it is within one.

    Attributes:
        base: microbatches that it had not to repeat; None until it says where it goes on.
        compiled: when it had its programs, as `time.monotonic` has it.
        ready: when it began to train.
    """

    def __init__(self, folder: Path, arguments: list[str], step_seconds: float) -> None:
        self._metrics, self._step_seconds = folder / "metrics.jsonl", step_seconds
        self.base: int | None = None
        self.compiled = self.ready = 0.0
        self.started = time.monotonic()
        self._inode_before = _inode(self._metrics)
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jpipe.train", *ARGUMENTS, *arguments, "--out", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def position(self) -> float:
        """Microbatches of the whole run that are finished, as far as can be told from outside."""
        if self._process.poll() is not None:
            raise RuntimeError("it ended by itself:\n" + "".join(self._lines))
        if self.base is None:
            return -1.0
        count, since = self._steps_logged()
        at, begun = self.base, self.ready
        if count * MICROBATCHES >= self.base and since > self.ready:
            at, begun = count * MICROBATCHES, since
        ahead = (time.monotonic() - begun) / self._step_seconds * MICROBATCHES
        end_of_step = MICROBATCHES * (at // MICROBATCHES + 1)
        return min(at + ahead, end_of_step - 0.01)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            found = _GOES_ON.search(line)
            if found:
                self.base = int(found[1]) * MICROBATCHES + int(found[2] or 0)
                self.ready = time.monotonic()
            elif line.startswith("start-up:"):
                self.compiled = time.monotonic()
                if self._fresh:
                    self.base, self.ready = 0, self.compiled

    @property
    def _fresh(self) -> bool:
        """Whether there is nothing to go on from."""
        return not any((self._metrics.parent / "snapshots").glob("step-*"))

    def _steps_logged(self) -> tuple[int, float]:
        """How many by this process or before its snapshot, and when the last one was."""
        try:
            stat = self._metrics.stat()
            if stat.st_ino == self._inode_before:  # what came before has not been cut off yet
                return 0, 0.0
            count = self._metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0, 0.0
        return count, time.monotonic() - (time.time() - stat.st_mtime)


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def seconds_a_step(folder: Path) -> float:
    """Median over a run, but for its first step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(BATCH * CONTEXT / row["tokens_per_s"] for row in rows[1:])
