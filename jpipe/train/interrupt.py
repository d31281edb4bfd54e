"""Ctrl-C asks the run to end after the step at hand; a second one ends it at once."""

import signal
import sys
from types import FrameType, TracebackType


class Interrupt:
    """While entered, notes the first interrupt instead of raising it."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        sys.stderr.write("\nending after the step at hand; Ctrl-C again ends at once\n")
