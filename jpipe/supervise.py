"""Starts processes again when one of them dies.

They are processes of their own, since what kills a run may not be caught within it: the kernel, a
library's abort, a collective that waits for ever. They must go on where they were by themselves.
"""

import contextlib
import math
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
_GRACE = 30.0  # seconds in which processes that work together end, once one has ended by itself


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
    commands: Callable[[], Sequence[Sequence[str]]],
    *,
    max_restarts: int,
    progress: Callable[[], Any],
    say: Callable[[str], None],
    patience: float | None = 60.0,
    first_delay: float = 1.0,
    done: Callable[[], bool] = lambda: False,
) -> int:
    """Run one or several processes that work together, until they end by themselves.

    They are started again if a signal but SIGTERM and SIGINT ended one, or it ended with the
    statuses `jpipe.cli.CRASHED` or `WEDGED`; any other is its own decision. What is left of the
    others then is killed: it would wait for the one that is missing. Between two starts passes a
    time that doubles. SIGTERM and SIGINT are handed on, and then their end is the end. Each is a
    process group of its own: a terminal's Ctrl-C then reaches it once, from here.

    Args:
        commands: makes the command of each process, anew for each start.
        max_restarts: how often in a row they may be started again without progress in between. What
            always dies at the same place is so told from what only was unlucky.
        progress: anything that grows with progress, such as the step of the newest snapshot.
        say: where to report.
        patience: seconds after which a process that was stopped (SIGSTOP) is killed; None to let
            it be.
        first_delay: seconds before the first restart.
        done: whether all that they were started for is done: who dies after that is not needed.

    Returns:
        The exit status of the first that did not end well, as a shell has it, or else 0.
    """
    failures, best = 0, progress()
    with _signals() as (received, hand_on):
        while True:
            status = _run(commands(), hand_on, patience, say)
            if received or not _died(status):
                return _as_shell(status)
            if done():
                say(f"it {_describe(status)} after everything was done")
                return 0
            failures = 1 if progress() > best else failures + 1
            best = max(best, progress())
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
    commands: Sequence[Sequence[str]],
    hand_on: list[int],
    patience: float | None,
    say: Callable[[str], None],
) -> int:
    """The exit status of the first that did not end well, or 0; negative if a signal ended it."""
    reader, writer = os.pipe()
    environment = {**os.environ, _PIPE: str(reader)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(command, pass_fds=(reader,), env=environment, process_group=0)
            )
        os.close(reader)
        stopped: dict[int, float] = {}
        first = 0  # status of the first that did not end well
        deadline = math.inf
        while running := [p for p in processes if p.poll() is None]:
            ended = [process.returncode or 0 for process in processes]
            if not first and any(ended):
                first = next(status for status in ended if status)
                deadline = time.monotonic() + (0 if _died(first) else _GRACE)
            if time.monotonic() >= deadline:
                for process in running:
                    process.kill()
            while hand_on:
                number = hand_on.pop(0)
                for process in running:
                    process.send_signal(number)
            for pid in [p.pid for p in running]:
                since = stopped.setdefault(pid, time.monotonic())
                if not _is_stopped(pid):
                    del stopped[pid]
                elif patience is not None and time.monotonic() - since > patience:
                    say(f"process {pid} was stopped for {patience:g} s: killing it")
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)
        ended = [process.returncode for process in processes if process.returncode]
        return first or next(filter(_died, ended), ended[0] if ended else 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        os.close(writer)


def _died(status: int) -> bool:
    """Whether a process has ended, but not by its own decision or because it was asked to."""
    asked = (-signal.SIGTERM, -signal.SIGINT)
    return (status < 0 and status not in asked) or status in (CRASHED, WEDGED)


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
