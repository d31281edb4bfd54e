"""Look into snapshots: list them, verify their checksums, compare two.

```
python tools/snapshots.py list runs/gpt-...       # what there is; fast, reads the manifests only
python tools/snapshots.py verify runs/gpt-...     # read every byte; exit status 1 if any is damaged
python tools/snapshots.py diff SNAPSHOT SNAPSHOT  # where two differ, and by how much
```

Snapshots within a step of equal runs may differ in slots of the stash that nothing is in:
accelerators do not clear them.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jpipe.cli import FAILED, Parser, refuse
from jpipe.memory import format_bytes
from jpipe.snapshot import DamageError, Manifest, read_snapshot, snapshot_folders
from jpipe.snapshot.manifest import FILE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = Parser(
        prog="python tools/snapshots.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, meaning in {"list": "what there is", "verify": "compare with checksums"}.items():
        command = commands.add_parser(name, help=meaning)
        command.add_argument("folder", type=Path, help="a run, its snapshots, or one snapshot")
    diff = commands.add_parser("diff", help="compare two snapshots")
    diff.add_argument("before", type=Path)
    diff.add_argument("after", type=Path)
    console = Console(markup=False, highlight=False)
    try:
        options = parser.parse_args(argv)
        if options.command == "list":
            return list_snapshots(console, find(options.folder))
        if options.command == "verify":
            return verify(console, find(options.folder))
        return compare(console, options.before, options.after)
    except ValueError as error:
        return refuse(error)


def find(folder: Path) -> list[Path]:
    """The snapshots in a run, in its folder of snapshots, or the one that it is.

    Raises:
        ValueError: if there is none.
    """
    if (folder / FILE).exists():
        return [folder]
    found = snapshot_folders(folder / "snapshots") or snapshot_folders(folder)
    if not found:
        raise ValueError(f"{folder} holds no snapshots; give a run folder, or one snapshot")
    return found


def list_snapshots(console: Console, folders: Sequence[Path]) -> int:
    """Print a line for each snapshot."""
    table = Table("snapshot", "step", "arrays", "numbers", "on disk", "taken", box=None)
    for folder in folders:
        size = format_bytes(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))
        try:
            manifest = Manifest.from_bytes((folder / FILE).read_bytes())
        except (DamageError, OSError):
            table.add_row(folder.name, "damaged", "", "", size, "")
            continue
        numbers = sum(
            math.prod(b - a for a, b in shard.ranges)
            for leaf in manifest.leaves.values()
            for shard in leaf.shards
        )
        taken = str(manifest.extra.get("taken", ""))
        row = [folder.name, manifest.step, len(manifest.leaves), f"{numbers:,}", size, taken]
        table.add_row(*map(str, row))
    console.print(table)
    return 0


def verify(console: Console, folders: Sequence[Path]) -> int:
    """Read every snapshot, and say which is good."""
    status = 0
    for folder in track(folders, "reading", console=console, transient=True):
        try:
            read_snapshot(folder)
            console.print(f"{folder.name}: good", soft_wrap=True)
        except DamageError as error:
            console.print(f"{folder.name}: damaged: {error}", soft_wrap=True)
            status = FAILED
    return status


def compare(console: Console, before: Path, after: Path) -> int:
    """Print how much each array of two snapshots differs."""
    try:
        old, new = read_snapshot(before), read_snapshot(after)
    except DamageError as error:
        raise ValueError(f"a snapshot is damaged: {error}") from error
    table = Table("array", "shape", "largest change", "root mean square", box=None)
    for name in sorted(old.arrays.keys() | new.arrays.keys()):
        a, b = old.arrays.get(name), new.arrays.get(name)
        if a is None or b is None:
            table.add_row(name, "", f"only in {after.name if a is None else before.name}", "")
        elif a.shape != b.shape or a.dtype != b.dtype:
            table.add_row(name, f"{a.dtype}{list(a.shape)}, {b.dtype}{list(b.shape)}", "", "")
        elif a.tobytes() != b.tobytes():
            change = b.astype(np.float64) - a.astype(np.float64)
            rms = math.sqrt(float(np.mean(change**2)))
            largest = float(np.abs(change).max())
            table.add_row(name, f"{a.dtype}{list(a.shape)}", f"{largest:.3g}", f"{rms:.3g}")
    console.print(table if table.row_count else "equal, bit by bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
