"""Where a run begins: at its first step, or where a snapshot was taken."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jpipe
from jpipe.processes import of_main
from jpipe.schedule import Schedule
from jpipe.snapshot import DamageError, Snapshot, SnapshotError, newest_good, read_snapshot
from jpipe.train.options import FREE, FREE_IF_NAMED, TrainOptions

FOLDER = "snapshots"
"""Name of the folder of snapshots in a run folder."""


def find_snapshot(options: TrainOptions) -> Snapshot | None:
    """The snapshot to go on from, which has been read and compared with its checksums.

    Args:
        options: of the run.

    Returns:
        The snapshot, or None to begin anew; the same one in every process.

    Raises:
        ValueError: if the one that is asked for is not there, or none that is there is good, or
            it is that of another model.
    """
    return None if options.resume == "never" else _agreed(lambda: _find(options))


def _agreed(find: Callable[[], Snapshot | None]) -> Snapshot | None:
    """The snapshot that the process which writes has found; all processes must call it.

    Args:
        find: finds it; is called in that process only.

    Raises:
        ValueError: if it finds none and says so, or another process cannot read what it found.
    """
    found: list[Snapshot | None] = []

    def path() -> str:
        found.append(find())
        return "" if found[0] is None else str(found[0].path.absolute())

    where = of_main(path)
    if found or not where:
        return found[0] if found else None
    try:
        return read_snapshot(Path(where))
    except DamageError as error:
        raise ValueError(
            f"process {jax.process_index()} cannot read {where}, which process 0 has read: "
            f"{error}; give --out a folder that all processes see"
        ) from error


def _find(options: TrainOptions) -> Snapshot | None:
    own = Path(options.out).expanduser() if options.out else None
    named = None if options.resume == "auto" else Path(options.resume).expanduser()
    try:
        snapshot = None
        # What this very run has left comes first, so that the same command can be given again;
        # unless it is one of these that is named.
        if own is not None and (named is None or not named.resolve().is_relative_to(own.resolve())):
            snapshot = newest_good(own / FOLDER)
        if snapshot is None and named is not None:
            snapshot = _read(named)
    except (DamageError, SnapshotError) as error:
        raise ValueError(f"--resume {options.resume}: {error}") from error
    if snapshot is None:
        if named is not None:
            raise ValueError(
                f"--resume {options.resume}: there is no snapshot; give a run folder or a folder "
                f"of one snapshot, such as runs/.../{FOLDER}/step-00000100"
            )
        return None
    try:
        before = dict(snapshot.manifest.extra["options"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{snapshot.path} is no snapshot of a run of this command") from error
    check_same(options, before, str(snapshot.path))
    return snapshot


def _read(where: Path) -> Snapshot | None:
    for folder in (where, where / FOLDER):
        if (folder / "manifest.json").exists():
            return read_snapshot(folder)
    return newest_good(where if where.name == FOLDER else where / FOLDER)


def identity(options: TrainOptions) -> dict[str, Any]:
    """The options that a run to go on with must share; fit for JSON."""
    shared = {k: v for k, v in dataclasses.asdict(options).items() if k not in FREE}
    fit: dict[str, Any] = json.loads(json.dumps(shared))
    return fit


def identity_within_a_step(options: TrainOptions, schedule: Schedule) -> dict[str, Any]:
    """What a run to go on with in the middle of a step must share beside; fit for JSON.

    The table counts, not its name: a file of that name may have been edited since.
    """
    names = ("mesh", "recompute", "verify_comm")
    return {
        **{name: getattr(options, name) for name in names},
        "table": _digest(schedule),
        "every": options.snapshot_every_microbatches,
        "versions": [jpipe.__version__, jax.__version__],
    }


def _digest(schedule: Schedule) -> str:
    """What tells a table from every other."""
    columns = schedule.op, schedule.microbatch, schedule.chunk, schedule.route
    routes = [sorted(route) for route in schedule.routes]
    whole = [schedule.hop, schedule.folded, routes, *(column.tolist() for column in columns)]
    return hashlib.sha256(json.dumps(whole, default=int).encode()).hexdigest()


def check_same(options: TrainOptions, before: dict[str, Any], where: str) -> None:
    """Refuse to go on with a run of other options.

    Args:
        options: of this run.
        before: `identity` of the other, or all of its options.
        where: the other's folder.

    Raises:
        ValueError: naming what differs.
    """
    free = FREE_IF_NAMED if options.resume not in ("auto", "never") else frozenset()
    different = [
        f"--{name.replace('_', '-')} {value} instead of {before.get(name)}"
        for name, value in identity(options).items()
        if before.get(name) != value and name not in free
    ]
    if different:
        raise ValueError(
            f"{where} holds a run of another kind: {', '.join(different)}; use what it began with "
            "to go on with it, or another --out and no --resume"
        )
