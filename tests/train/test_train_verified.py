"""A bit that flips on its way from stage to stage costs some time, and nothing else."""

import json

import pytest
from train.flips import flipping
from train.test_train_processes import run_together
from train.test_train_resume import assert_same_run
from train.test_train_run import SMALL, metrics, train

from jpipe.pipeline import executor
from jpipe.train.__main__ import main

VERIFIED = ["--mesh", "2", "--verify-comm"]
SNAPSHOTS = ["--snapshot-every-steps", "2"]
WITHIN = ["--microbatches", "4", "--snapshot-every-microbatches", "1"]


@pytest.fixture
def flips(monkeypatch):
    """Let a bit of what stage 0 sends flip, the n-th times that it does."""
    return lambda *times: monkeypatch.setattr(executor, "send", flipping(times))


def run(tmp_path, name, *arguments):
    (tmp_path / name).mkdir()
    return train(tmp_path / name, *VERIFIED, *arguments)


@pytest.mark.parametrize("within", [(), WITHIN], ids=["whole", "segments"])
def test_repeats_from_the_last_snapshot(tmp_path, capsys, flips, within):
    whole = run(tmp_path, "whole", *SNAPSHOTS, *within)
    flips(4)
    folder = run(tmp_path, "damaged", *SNAPSHOTS, *within)
    told = capsys.readouterr().out
    assert "warning: step 4: the activations of microbatch" in told
    assert "from stage 0 to stage 1, read in tick 3, arrived damaged; repeating from" in told
    assert_same_run(folder, whole)
    assert json.loads((folder / "summary.json").read_text())["damaged_steps"] == 1


def test_repeats_the_step_if_there_is_no_snapshot(tmp_path, capsys, flips):
    without = ["--snapshot-every-steps", "0"]
    whole = run(tmp_path, "whole", *without)
    flips(1, 3)
    folder = run(tmp_path, "damaged", *without)
    told = capsys.readouterr().out
    assert told.count("arrived damaged; repeating the step") == 2
    assert_same_run(folder, whole)


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
def test_several_processes_go_back_together(tmp_path):
    arguments = ["--mesh", "2", "--verify-comm", "--snapshot-every-steps", "2"]
    run_together(tmp_path / "whole", 2, *arguments)
    flipped = ("train.flips", "4", "--")
    outputs = run_together(tmp_path / "run", 2, *arguments, module=flipped)
    assert "warning: step 4: the activations of microbatch" in outputs[0]
    assert "repeating from" in outputs[0]
    assert "going on after step 2" in outputs[0]
    assert_same_run(tmp_path / "run", tmp_path / "whole")
