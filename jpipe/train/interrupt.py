"""Signals that ask a run to end: after the step at hand, with everything written.

Ctrl-C does, and SIGTERM, by which schedulers announce that a machine will be taken away. Python
hears of a signal only between two of its instructions, and a compile is one; but while nothing has
been computed that is not written, SIGTERM can end the process at once, and a thread sees to that.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

import jax

from jpipe.cli import INTERRUPTED, TERMINATED
from jpipe.processes import anywhere


class Interrupt:
    """While entered, notes the first signal instead of ending the process.

    Several processes hear of a signal at different times, or only some of them do. One that ended
    before the others would leave them waiting, so there a signal counts from the next `agree` on.

    Attributes:
        requested: whether there was one.
        terminated: whether it was SIGTERM.
    """

    def __init__(self) -> None:
        self.requested = self.terminated = False
        self._heard = (False, False)
        self._expendable = self._interrupted = False

    def __enter__(self) -> "Interrupt":
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True, name="signals").start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()  # the watching thread reads its end

    def agree(self) -> None:
        """Let a signal that one process has heard of count in all; all processes must call it."""
        self.requested, self.terminated = anywhere(*self._heard)

    @property
    def status(self) -> int:
        """The exit status that this makes for; 0 without a signal."""
        if self.terminated:
            return TERMINATED
        return INTERRUPTED if self.requested else 0

    @contextlib.contextmanager
    def nothing_to_lose(self) -> Iterator[None]:
        """While entered, SIGTERM ends the process at once."""
        self._expendable = True
        try:
            yield
        finally:
            self._expendable = False

    def _watch(self) -> None:
        with self._reader:
            while received := self._reader.recv(1):
                if received[0] == signal.SIGTERM and self._expendable:
                    sys.stderr.write("\nended by SIGTERM before there was anything to write\n")
                    sys.stderr.flush()
                    os._exit(TERMINATED)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._heard = True, self._heard[1] or number == signal.SIGTERM
        if jax.process_count() == 1:
            self.agree()
        if number == signal.SIGTERM:
            return
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
        sys.stderr.write("\nending after the step at hand; Ctrl-C again ends at once\n")
