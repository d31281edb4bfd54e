"""Processes of a run that are started here, and again when they die: the command supervises."""

import contextlib
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jpipe.snapshot import snapshot_folders, when_taken
from jpipe.supervise import supervise
from jpipe.train.options import TrainOptions
from jpipe.train.resume import FOLDER
from jpipe.train.run_folder import SUMMARY, holds_run, new_folder


def starts_group(options: TrainOptions) -> bool:
    """Whether the options ask for several processes on this machine.

    Raises:
        ValueError: if they ask for devices that processes cannot share.
    """
    alone = options.coordinator is None and options.process_id is None and not options.distributed
    if options.num_processes is None or not alone:
        return False
    if options.platform != "cpu":
        raise ValueError(
            f"--num-processes {options.num_processes} without --coordinator starts processes that "
            "share this machine, which works for --platform cpu; accelerators want one process a "
            "machine: give --coordinator and --process-id, or leave all of these out"
        )
    return True


def run_and_restart(argv: Sequence[str], options: TrainOptions) -> int:
    """Run the command in a process of its own, or in several, and again if one dies.

    Args:
        argv: its arguments.
        options: what they say.

    Returns:
        Its exit status.
    """
    folder = Path(options.out) if options.out else new_folder(options.model)
    out = [] if options.out else ["--out", str(folder)]
    snapshots = folder.expanduser() / FOLDER

    def taken() -> set[tuple[str, int, int]]:
        return _versions(snapshots.glob("step-*"))

    def written() -> set[tuple[str, int, int]]:
        return _versions(folder.expanduser().glob(SUMMARY))

    at_first, before = taken(), written()
    fresh = not holds_run(folder.expanduser())

    def commands() -> list[list[str]]:
        # --resume says where to begin, not where to go back to from snapshots of this run's own.
        begun = taken() - at_first or (fresh and options.resume == "never")
        own = ["--resume", "auto"] if begun else []
        command = [sys.executable, "-m", "jpipe.train", *argv, *out, *own]
        if not starts_group(options):
            return [command]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        return [
            [*command, "--coordinator", address, "--process-id", str(k)]
            for k in range(options.num_processes or 0)
        ]

    return supervise(
        commands,
        max_restarts=options.max_restarts,
        progress=lambda: max(map(when_taken, snapshot_folders(snapshots)), default=(-1, -1)),
        say=lambda text: print(f"supervisor: {text}", file=sys.stderr, flush=True),
        patience=options.comm_timeout or None,
        done=lambda: bool(written() - before),
    )


def _versions(paths: Iterable[Path]) -> set[tuple[str, int, int]]:
    """What there is, told apart from what had the same name before."""
    found = set()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a process on another machine removed it
            stat = path.stat()
            found.add((path.name, stat.st_ino, stat.st_mtime_ns))
    return found
