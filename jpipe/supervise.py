"""Starts a command again when it dies.

The command is a process of its own, since what kills a run may not be caught within it: the kernel,
a library's abort, a collective that waits for ever. It must go on where it was by itself.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jpipe.cli import CRASHED, WEDGED

_PIPE = (
    "JPIPE_SUPERVISOR"  # environment variable: the file descriptor that ends with the supervisor
)
_LONGEST = 60.0  # seconds between an end and the next start
_POLL = 0.05


def is_supervised() -> bool:
    """Whether this process was started by `supervise`."""
    return _PIPE in os.environ


def end_with_supervisor() -> None:
    """Let this process get a SIGTERM if its supervisor dies; to be called by what it starts."""
    descriptor = int(os.environ[_PIPE])

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(descriptor, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="supervisor").start()


def supervise(
    command: Sequence[str],
    *,
    max_restarts: int,
    progress: Callable[[], Any],
    say: Callable[[str], None],
    patience: float | None = 60.0,
    first_delay: float = 1.0,
) -> int:
    """Run a command until it ends by itself.

    It is started again if a signal ended it, or with the statuses `jpipe.cli.CRASHED` and `WEDGED`;
    any other is its own decision. Between two starts passes a time that doubles. SIGTERM and SIGINT
    are handed on to the command, and then its end is the end.

    Args:
        command: the command and its arguments.
        max_restarts: how often in a row it may be started again without progress in between. A
            command that always dies at the same place is so told from one that only was unlucky.
        progress: anything that changes with progress, such as the newest snapshot.
        say: where to report.
        patience: seconds after which a command that was stopped (SIGSTOP) is killed; None to let
            it be.
        first_delay: seconds before the first restart.

    Returns:
        The command's exit status, as a shell has it.
    """
    failures = 0
    with _signals() as (received, hand_on):
        while True:
            before = progress()
            status = _run(command, hand_on, patience, say)
            if received or not (status < 0 or status in (CRASHED, WEDGED)):
                return _as_shell(status)
            failures = 1 if progress() != before else failures + 1
            if failures > max_restarts:
                say(f"it {_describe(status)}, no progress in {failures} starts: giving up")
                return _as_shell(status)
            delay = min(first_delay * 2 ** (failures - 1), _LONGEST)
            say(
                f"it {_describe(status)}; starting it again in {delay:g} s (restart {failures} of "
                f"{max_restarts} without progress)"
            )
            deadline = time.monotonic() + delay
            while time.monotonic() < deadline:
                if received:
                    return 128 + received[0]
                time.sleep(_POLL)


def _run(
    command: Sequence[str],
    hand_on: list[int],
    patience: float | None,
    say: Callable[[str], None],
) -> int:
    """The command's exit status; negative if a signal ended it."""
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            command, pass_fds=(reader,), env={**os.environ, _PIPE: str(reader)}
        )
        os.close(reader)
        stopped: float | None = None
        while process.poll() is None:
            while hand_on:
                process.send_signal(hand_on.pop(0))
            if not _is_stopped(process.pid):
                stopped = None
            elif stopped is None:
                stopped = time.monotonic()
            elif patience is not None and time.monotonic() - stopped > patience:
                say(f"it was stopped for {patience:g} s: killing it")
                process.kill()
            time.sleep(_POLL)
        return process.returncode
    finally:
        os.close(writer)


def _is_stopped(pid: int) -> bool:
    options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    try:
        found = os.waitid(os.P_PID, pid, options)
    except ChildProcessError:  # it has just ended
        return False
    return found is not None and found.si_code == os.CLD_STOPPED


@contextlib.contextmanager
def _signals() -> Iterator[tuple[list[int], list[int]]]:
    """Signals received so far, and those to hand on."""
    received: list[int] = []
    hand_on: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        hand_on.append(number)

    before = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received, hand_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _as_shell(status: int) -> int:
    return 128 - status if status < 0 else status


def _describe(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
