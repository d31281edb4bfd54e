"""A bit that flips on its way from stage to stage costs some time, and nothing else."""

import json

import pytest
from train.flips import flipping
from train.test_train_processes import run_together
from train.test_train_resume import assert_same_run
from train.test_train_run import SMALL, metrics, train

from jpipe.pipeline import executor
from jpipe.snapshot import SnapshotError, SnapshotStore
from jpipe.train.__main__ import main

VERIFIED = ["--mesh", "2", "--verify-comm"]
SNAPSHOTS = ["--snapshot-every-steps", "2"]
WITHIN = ["--microbatches", "4", "--snapshot-every-microbatches", "1"]


@pytest.fixture
def flips(monkeypatch):
    """Let a bit of what stage 0 sends flip, the n-th times that it does."""

    def arm(*times, **where):
        monkeypatch.setattr(executor, "send", flipping(times, send, **where))

    send = executor.send
    return arm


def run(tmp_path, name, *arguments):
    (tmp_path / name).mkdir()
    return train(tmp_path / name, *VERIFIED, *arguments)


@pytest.mark.parametrize("within", [(), WITHIN], ids=["whole", "segments"])
def test_repeats_the_step(tmp_path, capsys, flips, within):
    whole = run(tmp_path, "whole", *SNAPSHOTS, *within)
    flips(1, 5, 6)
    folder = run(tmp_path, "damaged", *SNAPSHOTS, *within)
    told = capsys.readouterr().out
    assert told.count("warning: step 1: the activations of microbatch 1 from stage 0") == 1
    assert told.count("warning: step 4: the activations of microbatch 1 from stage 0") == 2
    assert told.count("to stage 1, read in tick 3, arrived damaged; repeating the step") == 3
    assert_same_run(folder, whole)
    assert json.loads((folder / "summary.json").read_text())["damaged_steps"] == 3


@pytest.mark.parametrize(("schedule", "tick"), [("1f1b", 3), ("1f1b-overlap", 5)])
def test_snapshots_within_a_damaged_step_are_replaced(tmp_path, capsys, flips, schedule, tick):
    """What a segment's last tick sends is read in the next one, after a snapshot."""
    where = ["--mesh", "4", "--schedule", schedule, *WITHIN, "--keep-snapshots", "2"]
    whole = run(tmp_path, "whole", *where)
    flips(4, tick=tick, stage=1)
    folder = run(tmp_path, "damaged", *where)
    told = capsys.readouterr().out
    assert told.count("repeating the step") == 1
    assert f"read in tick {tick + 1}, arrived damaged" in told
    assert_same_run(folder, whole)


def test_snapshots_stay_if_there_is_no_room_for_another(tmp_path, monkeypatch, flips):
    save = SnapshotStore.save

    def full(store, state, step, extra, *, microbatch=0):
        if step == 3 and not microbatch:
            raise SnapshotError("there is no room")
        return save(store, state, step, extra, microbatch=microbatch)

    monkeypatch.setattr(SnapshotStore, "save", full)
    forgotten = []
    monkeypatch.setattr(SnapshotStore, "forget_after", lambda *args: forgotten.append(args[1:]))
    where = ["--mesh", "4", "--snapshot-every-steps", "0", *WITHIN, "--snapshot-errors", "go-on"]
    flips(4, tick=3, stage=1)
    folder = run(tmp_path, "damaged", *where)
    assert json.loads((folder / "summary.json").read_text())["damaged_steps"] == 1
    assert not forgotten


def test_a_step_that_is_always_damaged_ends_the_run(tmp_path, capsys, flips):
    flips(*range(3, 100))
    arguments = ["--out", str(tmp_path / "run"), *SMALL, *VERIFIED, *SNAPSHOTS]
    assert main(arguments) == 1
    told = capsys.readouterr().out
    assert told.count("warning: step 3: ") == 3
    assert "arrived damaged, for the 4th time: a device or a link is at fault" in told
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


def test_goes_on_without_verifying(tmp_path):
    """What is verified is no property of a run."""
    first = [*SMALL, *VERIFIED, "--out", str(tmp_path / "run"), "--steps", "3"]
    assert main(first) == 0
    assert main([*SMALL, "--mesh", "2", "--out", str(tmp_path / "run"), "--steps", "5"]) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("within", [(), WITHIN], ids=["whole", "segments"])
def test_several_processes_repeat_it_together(tmp_path, within):
    arguments = [*VERIFIED, *SNAPSHOTS, *within]
    run_together(tmp_path / "whole", 2, *arguments)
    flipped = ("train.flips", "4", "--")
    outputs = run_together(tmp_path / "run", 2, *arguments, module=flipped)
    assert "warning: step 4: the activations of microbatch" in outputs[0]
    assert "repeating the step" in outputs[0]
    assert_same_run(tmp_path / "run", tmp_path / "whole")
