"""A run that is started again when it dies: the command as its own supervisor."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jpipe.supervise import supervise
from jpipe.train.options import TrainOptions
from jpipe.train.resume import FOLDER
from jpipe.train.run_folder import new_folder


def run_and_restart(argv: Sequence[str], options: TrainOptions) -> int:
    """Run the command in a process of its own, and again if it dies.

    Args:
        argv: its arguments.
        options: what they say.

    Returns:
        Its exit status.
    """
    folder = Path(options.out) if options.out else new_folder(options.model)
    out = [] if options.out else ["--out", str(folder)]
    snapshots = folder.expanduser() / FOLDER

    def newest() -> list[str]:
        return sorted(p.name for p in snapshots.glob("step-*")) if snapshots.is_dir() else []

    return supervise(
        [sys.executable, "-m", "jpipe.train", *argv, *out],
        max_restarts=options.max_restarts,
        progress=newest,
        say=lambda text: print(f"supervisor: {text}", file=sys.stderr, flush=True),
        patience=options.comm_timeout or None,
    )
