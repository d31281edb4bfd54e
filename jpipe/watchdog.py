"""Ends a process that makes no progress: a collective that waits for ever says nothing."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

import jax

from jpipe.cli import WEDGED

LEAST = 0.5
"""Seconds that a deadline must leave."""

APART = 600.0
"""Seconds that processes may be apart when they start and end: one has to compile what another
finds compiled, or reads what another has read."""

_STARVED = 1.0  # seconds by which a thread may be late on a busy machine


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
        # What it is, when it must be done, and how many seconds it has.
        self._piece: tuple[str, float, float] | None = None
        self._asleep = 0.0  # seconds in which the process was stopped, or the machine asleep
        self._noted = ""
        self._closed = threading.Event()
        if seconds is not None:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextlib.contextmanager
    def watch(self, piece: str, at_least: float = 0.0) -> Iterator[None]:
        """While entered, the piece of work must be done in time.

        Args:
            piece: what it is, such as `step 12`.
            at_least: seconds that it may take in any case.
        """
        if self._seconds is None:
            yield
            return
        self._noted = ""
        seconds = max(self._seconds, at_least)
        self._piece = piece, time.monotonic() - self._asleep + seconds, seconds
        try:
            yield
        finally:
            self._piece = None

    def watch_others(
        self, piece: str, at_least: float = 0.0
    ) -> contextlib.AbstractContextManager[None]:
        """As `watch`, for what may take its time here, but waits for other processes.

        Where there are none, nothing is watched: a slow disk alone is no reason to end.
        """
        several = jax.process_count() > 1
        return self.watch(piece, at_least) if several else contextlib.nullcontext()

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
        pause, before = min(1.0, self._seconds / 5), time.monotonic()
        while not self._closed.wait(pause):
            now = time.monotonic()
            if now - before > pause + _STARVED:
                self._asleep += now - before - pause
            before, piece = now, self._piece
            if piece is not None and now - self._asleep > piece[1]:
                self._end(piece[0], piece[2])

    def _end(self, piece: str, seconds: float) -> None:
        sys.stderr.write(
            f"\nerror: process {os.getpid()}: {piece} was not done after {seconds:g} s"
            f"{self._noted and f' (the last known of it: {self._noted})'}: a "
            "device or another process has stopped, or waits for ever; where every thread is:\n"
        )
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        os._exit(WEDGED)
