"""Ends a process that makes no progress: a collective that waits for ever says nothing."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

from jpipe.cli import WEDGED

LEAST = 0.5
"""Seconds that a deadline must leave."""


class Watchdog:
    """Watches over pieces of work, from a thread of its own.

    A piece that is not done in time is named on stderr, with the stacks of all threads, and the
    process ends at once with status `jpipe.cli.WEDGED`: nothing can call a stuck collective back.

    Args:
        seconds: that a piece may take; None to watch nothing.

    Raises:
        ValueError: if `seconds` is below `LEAST`.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and seconds < LEAST:
            raise ValueError(f"seconds={seconds} must be at least {LEAST}, or None for no watchdog")
        self._seconds = seconds
        self._piece: tuple[str, float] | None = None  # what it is, and when it must be done
        self._noted = ""
        self._closed = threading.Event()
        if seconds is not None:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextlib.contextmanager
    def watch(self, piece: str) -> Iterator[None]:
        """While entered, the piece of work must be done in time.

        Args:
            piece: what it is, such as `step 12`.
        """
        if self._seconds is None:
            yield
            return
        self._noted = ""
        self._piece = piece, time.monotonic() + self._seconds
        try:
            yield
        finally:
            self._piece = None

    def note(self, done: str) -> None:
        """Say how far the piece at hand has come, to be told if it comes no further.

        Args:
            done: such as `tick 8 of 38`.
        """
        self._noted = done

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        assert self._seconds is not None
        while not self._closed.wait(min(1.0, self._seconds / 5)):
            piece = self._piece
            if piece is not None and time.monotonic() > piece[1]:
                self._end(piece[0])

    def _end(self, piece: str) -> None:
        sys.stderr.write(
            f"\nerror: process {os.getpid()}: {piece} was not done after {self._seconds:g} s"
            f"{self._noted and f' (the last known of it: {self._noted})'}: a "
            "device or another process has stopped, or waits for ever; where every thread is:\n"
        )
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        os._exit(WEDGED)
