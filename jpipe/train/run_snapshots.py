"""The snapshots of a run: when they are taken, where it goes on, what they cost."""

import time
from collections.abc import Callable
from typing import Any

import jax

from jpipe.optim import PerDevice
from jpipe.processes import anywhere
from jpipe.snapshot import (
    MismatchError,
    Snapshot,
    SnapshotError,
    SnapshotStore,
)
from jpipe.train.resume import FOLDER, identity, identity_within_a_step
from jpipe.train.setup import Setup
from jpipe.train_step import TrainState

_STATE, _CARRY = "state", "carry"


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
        self._newest: tuple[int, int] | None = None  # step and microbatch
        self._waited: list[dict[str, Any]] = []
        self._store: SnapshotStore | None = None
        if (self._every or options.snapshot_every_microbatches) and not options.dry_run:
            self._store = SnapshotStore(
                setup.folder.path / FOLDER,
                keep_last=options.keep_snapshots,
                keep_every=options.keep_every,
            )

    def restore(
        self, fresh: Callable[[], TrainState], carry: Any | None
    ) -> tuple[TrainState, Any | None]:
        """What the run goes on from: a state, and in the middle of a step what is held there.

        The snapshot is let go of afterwards: on the host it may be larger than all else.

        Args:
            fresh: makes a fresh state.
            carry: shapes and shardings of what is held within a step; None if that is not asked
                for.

        Returns:
            The snapshot's state, laid out as the fresh one is, or the fresh one; and what is held
            within a step with the segment that comes next, or None.

        Raises:
            MismatchError: if the snapshot is that of another model.
        """
        snapshot, self._setup.snapshot = self._setup.snapshot, None
        if snapshot is None:
            return fresh(), None
        try:
            restored: TrainState
            restored, left = snapshot.restore(_outline(fresh()), f"['{_STATE}']")
        except MismatchError as error:
            raise MismatchError(f"{snapshot.path} does not fit: {error}") from error
        manifest, within = snapshot.manifest, None
        if manifest.microbatch:
            within = self._restore_within(snapshot, carry)
        self._newest = (manifest.step, manifest.microbatch if within else 0)
        if self._store is not None:
            self._store.forget_after(manifest.step, manifest.microbatch)
        where = f"within step {manifest.step + 1}" if within else f"after step {manifest.step}"
        self._say(f"going on {where}, from {snapshot.path}")
        if manifest.microbatch and not within:
            self._say(
                f"it was taken about {manifest.microbatch} microbatches later, within a step that "
                "is cut in another way now; these are computed again"
            )
        if left:
            self._say(
                "the blocks lie on other devices: what the compression of gradients had not said "
                "yet is forgotten"
            )
        return restored, within

    def _restore_within(self, snapshot: Snapshot, carry: Any | None) -> tuple[Any, int] | None:
        within = snapshot.manifest.extra["within"]
        if carry is None or within["identity"] != self._identity_within_a_step():
            return None
        try:
            return snapshot.restore(carry, f"['{_CARRY}']")[0], within["next"]
        except MismatchError:
            return None

    def _identity_within_a_step(self) -> dict[str, Any]:
        return identity_within_a_step(self._setup.options, self._setup.schedule)

    def within_step(
        self, state: TrainState, carry: Any, following: int, microbatch: int, cursor: dict[str, int]
    ) -> None:
        """Take a snapshot between two segments of a step.

        Args:
            state: what the step began with.
            carry: what is held within it.
            following: index of the next segment.
            microbatch: about so many are finished.
            cursor: where in the data the step began.
        """
        identity = self._identity_within_a_step()
        extra = {"data": cursor, "within": {"next": following, "identity": identity}}
        self._save({_STATE: state, _CARRY: carry}, int(state.step), extra, microbatch)

    def replace_within(self, state: TrainState) -> None:
        """Of a step that was damaged, keep what it began with instead of what is within it.

        What was damaged may lie in these, not yet read by any stage.
        """
        if self._setup.options.snapshot_every_microbatches is None:
            return
        step = int(state.step)
        self._save_state(state, step)
        self.wait()
        if self._newest == (step, 0):  # it was written
            self._try(lambda store: store.forget_after(step, 0))

    def after_step(self, state: TrainState, step: int) -> None:
        """Take a snapshot if it is time for one."""
        if self._every and step % self._every == 0:
            self._save_state(state, step)

    def at_the_end(self, state: TrainState) -> None:
        """Take the last one, and wait until it is written."""
        self.wait()  # a failure counts, in every process
        step = int(state.step)
        if step and (self._newest is None or self._newest[0] < step):
            self._save_state(state, step)
        self.wait()

    def wait(self) -> None:
        """Wait for what is being written, and say what went wrong, as `poll` does.

        A snapshot that failed in one process has failed in all, which must all call this.
        """

        def wait(store: SnapshotStore) -> None:
            failed = None
            try:
                store.wait()
            except SnapshotError as error:
                failed = error
            if anywhere(failed is not None)[0]:
                raise failed or SnapshotError("a snapshot could not be written by another process")

        self._try(wait)

    def poll(self) -> None:
        """Say what went wrong in the background; ends the run or not, as the user chose.

        Of several processes each knows only of its own part: there it is said before the next.
        """
        if jax.process_count() == 1:
            self._try(lambda store: store.poll())

    def close(self) -> None:
        """Wait for what is being written."""
        self._try(lambda store: store.close())

    def summary(self) -> dict[str, Any]:
        """What summary.json says of them: how long the run waited for each."""
        return {"snapshots": self._waited}

    def _save_state(self, state: TrainState, step: int) -> None:
        self._save({_STATE: state}, step, {"data": self._setup.task.batches.get_state()}, 0)

    def _save(self, tree: Any, step: int, extra: dict[str, Any], microbatch: int) -> None:
        extra |= {
            "options": identity(self._setup.options),
            "taken": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }

        started = time.perf_counter()

        def save(store: SnapshotStore) -> None:
            store.save(tree, step, extra, microbatch=microbatch)
            self._newest = (step, microbatch)
            seconds = round(time.perf_counter() - started, 6)
            self._waited.append({"step": step, "microbatch": microbatch, "seconds_waited": seconds})

        self._setup.folder.sync()  # what comes before a snapshot must be there with it
        self.wait()  # one that failed must not hinder the next
        self._try(save)

    def _try(self, act: Callable[[SnapshotStore], None]) -> None:
        if self._store is None:
            return
        try:
            act(self._store)
        except SnapshotError as error:
            self._newest = None  # to be tried again at the end
            if self._setup.options.snapshot_errors == "end":
                raise
            self._say(f"warning: {error}; going on without it")


def _outline(state: TrainState) -> TrainState:
    """A state without its memory, for which a device may not have room twice.

    What each device has of its own stays: a snapshot from another mesh does not have it.
    """

    def outline(node: Any) -> Any:
        if isinstance(node, PerDevice):
            return node
        return jax.ShapeDtypeStruct(node.shape, node.dtype, sharding=node.sharding)

    outlined: TrainState = jax.tree.map(outline, state, is_leaf=lambda n: isinstance(n, PerDevice))
    return outlined
