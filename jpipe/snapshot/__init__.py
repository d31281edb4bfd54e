"""Snapshots of a training state: verified, atomic, written in the background."""

from jpipe.snapshot.leaves import MismatchError
from jpipe.snapshot.manifest import DamageError, Manifest
from jpipe.snapshot.reader import (
    Snapshot,
    SnapshotError,
    newest_good,
    read_snapshot,
    snapshot_folders,
    when_taken,
)
from jpipe.snapshot.store import SnapshotStore

__all__ = [
    "DamageError",
    "Manifest",
    "MismatchError",
    "Snapshot",
    "SnapshotError",
    "SnapshotStore",
    "newest_good",
    "read_snapshot",
    "snapshot_folders",
    "when_taken",
]
