"""The parent's side of the conversation with the workers."""

import json
import os
import pathlib
import select
import signal
import subprocess
from typing import Any


class WorkerError(Exception):
    """A worker said that something failed, died, or did not answer in time."""


class Worker:
    """A process that runs the contenders of one framework, started again if it hangs or dies."""

    def __init__(self, python: pathlib.Path, script: pathlib.Path, folder: pathlib.Path) -> None:
        """Start nothing yet.

        Args:
            python: interpreter of the framework's environment.
            script: the worker.
            folder: of the problems; takes the worker's log as well.
        """
        self._command = [str(python), str(script), str(folder)]
        self._log = folder / f"{script.stem}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, timeout: float, op: str, **arguments: Any) -> Any:
        """The answer to one command.

        Raises:
            WorkerError: see there.
        """
        if self._process is None:
            with open(self._log, "ab") as log:
                # In a process group of its own, so that its children end with it.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died, and reading says so
        answers = self._process.stdout
        line = answers.readline() if select.select([answers], [], [], timeout)[0] else None
        if not line:
            self.stop()
            raise WorkerError("died" if line == b"" else f"no answer within {timeout:.0f} s")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def stop(self) -> None:
        """End the process and its children."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
