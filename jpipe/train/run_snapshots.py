"""The snapshots of a run: when they are taken, where it goes on, what they cost."""

import time
from collections.abc import Callable
from typing import Any

from jpipe.snapshot import MismatchError, SnapshotError, SnapshotStore
from jpipe.train.resume import FOLDER, identity
from jpipe.train.setup import Setup
from jpipe.train_step import TrainState


class RunSnapshots:
    """Takes the snapshots of a run.

    Args:
        setup: the run.
        say: where to report.
    """

    def __init__(self, setup: Setup, say: Callable[[str], None]) -> None:
        options = setup.options
        self._setup, self._say = setup, say
        self._every = options.snapshot_every_steps
        self._last: int | None = None  # step of the newest
        self._blocked: list[float] = []
        self._store: SnapshotStore | None = None
        if self._every and not options.dry_run:
            self._store = SnapshotStore(
                setup.folder.path / FOLDER,
                keep_last=options.keep_snapshots,
                keep_every=options.keep_every,
            )

    def restore(self, state: TrainState) -> TrainState:
        """The state of the snapshot to go on from, laid out as a fresh one is; or the fresh one.

        Raises:
            ValueError: if the snapshot is that of another model.
        """
        snapshot = self._setup.snapshot
        if snapshot is None:
            return state
        try:
            restored: TrainState
            restored, left = snapshot.restore(state)
        except MismatchError as error:
            raise ValueError(f"{snapshot.path} does not fit: {error}") from error
        step = snapshot.manifest.step
        self._last = step
        self._say(f"going on after step {step}, from {snapshot.path}")
        if left:
            self._say(
                "the mesh is another one: what the compression of gradients had not said yet is "
                "forgotten"
            )
        return restored

    def after_step(self, state: TrainState, step: int) -> None:
        """Take a snapshot if it is time for one."""
        if self._every and step % self._every == 0:
            self._save(state, step)

    def at_the_end(self, state: TrainState) -> None:
        """Take the last one, and wait until it is written."""
        step = int(state.step)
        if self._store is not None and step and step != self._last:
            self._save(state, step)
        self._try(lambda store: store.wait())

    def poll(self) -> None:
        """Say what went wrong in the background; ends the run or not, as the user chose."""
        self._try(lambda store: store.poll())

    def close(self) -> None:
        """Wait for what is being written."""
        self._try(lambda store: store.close())

    def summary(self) -> dict[str, Any]:
        """What summary.json says of them."""
        return {"snapshots": len(self._blocked), "seconds_waited_for_snapshots": sum(self._blocked)}

    def _save(self, state: TrainState, step: int) -> None:
        extra = {
            "options": identity(self._setup.options),
            "data": self._setup.task.batches.get_state(),
            "taken": time.strftime("%Y-%m-%d %H:%M:%S"),
        }

        def save(store: SnapshotStore) -> None:
            self._blocked.append(store.save(state, step, extra))
            self._last = step

        self._try(save)

    def _try(self, act: Callable[[SnapshotStore], None]) -> None:
        if self._store is None:
            return
        try:
            act(self._store)
        except SnapshotError as error:
            if self._setup.options.snapshot_errors == "end":
                raise
            self._say(f"warning: {error}; going on without it")
