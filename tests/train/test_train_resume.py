"""A run that ended goes on where its last good snapshot was taken, with the same numbers."""

import errno
import gc
import json
import os
import shutil
import signal
import weakref

import jax
import jax.numpy as jnp
import pytest
from train.test_train_run import SMALL, metrics, train

from jpipe.schedule import make_schedule
from jpipe.schedule.cells import schedule_to_cells, write_schedule
from jpipe.snapshot import Snapshot, SnapshotError, SnapshotStore, leaves, snapshot_folders
from jpipe.train.__main__ import main
from jpipe.train.run_folder import RunFolder
from jpipe.train.stepper import Stepper

EVERY = ["--snapshot-every-steps", "1", "--keep-snapshots", "9"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    return train(tmp_path_factory.mktemp("whole"), "--mesh", "2", *EVERY)


def as_if_killed_after(whole, tmp_path, step, name="run"):
    """A copy without what came after a step; of its metrics one line too many, and half a line."""
    folder = tmp_path / name
    shutil.copytree(whole, folder)
    for k in range(step + 1, 6):
        shutil.rmtree(folder / "snapshots" / f"step-{k:08d}", ignore_errors=True)
    for left in ("summary.json", "params.msgpack", "sample.txt", "loss.png"):
        (folder / left).unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[: step + 1]) + '{"step": 9')
    return folder


def assert_same_run(folder, whole):
    assert (folder / "params.msgpack").read_bytes() == (whole / "params.msgpack").read_bytes()
    assert (folder / "sample.txt").read_bytes() == (whole / "sample.txt").read_bytes()
    for row, expected in zip(metrics(folder), metrics(whole), strict=True):
        for name in ("step", "loss", "grad_norm", "validation_loss"):
            assert row.get(name) == expected.get(name), f"{name} of step {row['step']}"
    summary, expected = (json.loads((f / "summary.json").read_text()) for f in (folder, whole))
    assert summary["validation_loss"] == expected["validation_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["params.msgpack", "loss.png", "sample.txt"])
def test_is_finished_only_with_everything_written(whole, tmp_path, monkeypatch, name):
    write = RunFolder.write

    def full(folder, written, content):
        if written == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.path / name))
        write(folder, written, content)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write", full)
        arguments = [*SMALL, "--mesh", "2", *EVERY, "--out", str(tmp_path / "run")]
        assert main(arguments) == 1
    assert_same_run(train(tmp_path, "--mesh", "2", *EVERY), whole)


@pytest.mark.parametrize("step", [1, 3, 4])
def test_goes_on_bit_by_bit(whole, tmp_path, capsys, step):
    folder = as_if_killed_after(whole, tmp_path, step)
    assert train(tmp_path, "--mesh", "2", *EVERY) == folder
    assert f"going on after step {step}" in capsys.readouterr().out
    assert_same_run(folder, whole)


def test_goes_on_without_room_for_two_states(whole, tmp_path, monkeypatch):
    """Neither on the devices, where a fresh one shows the way, nor on the host."""
    as_if_killed_after(whole, tmp_path, 3)
    live, sizes, snapshots, freed = [], [], [], []
    put, restore, take = leaves._put, Snapshot.restore, Stepper.take

    def watched_put(array, like):
        live.append(sum(a.nbytes for a in jax.live_arrays()))
        sizes.append(array.nbytes)
        return put(array, like)

    def watched_restore(snapshot, *args):
        snapshots.append(weakref.ref(snapshot))
        return restore(snapshot, *args)

    def watched_take(*args):
        gc.collect()
        freed.append(snapshots[0]() is None)
        return take(*args)

    monkeypatch.setattr(leaves, "_put", watched_put)
    monkeypatch.setattr(Snapshot, "restore", watched_restore)
    monkeypatch.setattr(Stepper, "take", watched_take)
    gc.collect()
    before = sum(a.nbytes for a in jax.live_arrays())
    train(tmp_path, "--mesh", "2", *EVERY)
    assert live[0] - before < sum(sizes) / 4
    assert live[-1] - before < sum(sizes) * 1.25
    assert all(freed)
    assert len(freed) == 2


def test_begins_anew_where_there_is_no_snapshot_yet(whole, tmp_path):
    folder = as_if_killed_after(whole, tmp_path, 2)
    shutil.rmtree(folder / "snapshots")
    before = (folder / "metrics.jsonl").read_bytes()
    train(tmp_path, "--mesh", "2", *EVERY)
    assert_same_run(folder, whole)
    assert (folder / "metrics-before-1.jsonl").read_bytes() == before


def test_a_run_that_only_lacks_its_end_is_finished(whole, tmp_path):
    folder = as_if_killed_after(whole, tmp_path, 5)
    train(tmp_path, "--mesh", "2", *EVERY)
    assert_same_run(folder, whole)


def test_an_earlier_snapshot_begins_another_life(whole, tmp_path, capsys):
    """What came after it is gone, and does not come back."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    one = folder / "snapshots" / "step-00000002"
    train(tmp_path, "--mesh", "2", "--resume", str(one), "--steps", "3", *EVERY)
    names = [path.name for path in snapshot_folders(folder / "snapshots")]
    assert names == ["step-00000001", "step-00000002", "step-00000003"]
    capsys.readouterr()
    train(tmp_path, "--mesh", "2", "--steps", "4", *EVERY)
    assert "going on after step 3" in capsys.readouterr().out
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]


def test_the_command_that_began_from_another_run_can_be_given_again(whole, tmp_path):
    one = str(whole / "snapshots" / "step-00000003")
    arguments = ["--mesh", "2", "--resume", one, *EVERY]
    folder = train(tmp_path, *arguments)
    shutil.rmtree(folder / "snapshots" / "step-00000005")
    (folder / "summary.json").unlink()
    train(tmp_path, *arguments)
    assert [row["step"] for row in metrics(folder)] == [4, 5]


def test_a_dry_run_changes_nothing(whole, tmp_path):
    folder = as_if_killed_after(whole, tmp_path, 3)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    train(tmp_path, "--mesh", "4", "--dry-run", "--steps", "9")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_two_runs_do_not_write_to_one_folder(whole, tmp_path, capsys):
    folder = as_if_killed_after(whole, tmp_path, 3)
    other = RunFolder(str(folder), "gpt", {}, goes_on=True)
    assert main([*SMALL, "--mesh", "2", "--out", str(folder)]) == 2
    assert "is being written by another process" in capsys.readouterr().err
    other.close()


@pytest.mark.parametrize("config", ["[]", "3", "{", ""])
def test_a_broken_configuration(whole, tmp_path, capsys, config):
    folder = as_if_killed_after(whole, tmp_path, 3)
    shutil.rmtree(folder / "snapshots")
    (folder / "config.json").write_text(config)
    assert main([*SMALL, "--mesh", "2", "--out", str(folder)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_broken_lines_of_metrics_are_left_out(whole, tmp_path):
    folder = as_if_killed_after(whole, tmp_path, 3)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "1", "{}", *lines[1:]]))
    train(tmp_path, "--mesh", "2", *EVERY)
    assert_same_run(folder, whole)


def test_a_step_that_is_missing_in_metrics_is_told(whole, tmp_path):
    folder = as_if_killed_after(whole, tmp_path, 3)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([lines[0], *lines[2:]]))
    with pytest.warns(UserWarning, match="does not have each step up to 3 once"):
        train(tmp_path, "--mesh", "2", *EVERY)


def test_a_snapshot_of_something_else(tmp_path, capsys):
    store = SnapshotStore(tmp_path / "snapshots")
    store.save({"x": jnp.ones(3)}, 1, {})
    store.close()
    assert main([*SMALL, "--mesh", "2", "--resume", str(tmp_path)]) == 2
    assert "is no snapshot of a run of this command" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_snapshot_is_named_and_the_one_before_it_used(whole, tmp_path, capsys):
    folder = as_if_killed_after(whole, tmp_path, 4)
    shutil.rmtree(folder / "snapshots" / "step-00000004" / "state")
    (folder / "snapshots" / "step-00000003" / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="damaged") as warned:
        train(tmp_path, "--mesh", "2", *EVERY)
    assert "step-00000004" in str(warned[0].message)
    assert "going on after step 2" in capsys.readouterr().out
    assert_same_run(folder, whole)


def test_no_good_snapshot_is_an_error(whole, tmp_path, capsys):
    folder = as_if_killed_after(whole, tmp_path, 1)
    (folder / "snapshots" / "step-00000001" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="damaged"):
        assert main([*SMALL, "--mesh", "2", "--out", str(folder)]) == 2
    assert "none of the 1 snapshots" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--mesh", "3"],
        ["--mesh", "2", "--schedule", "zero-bubble-v"],
        pytest.param(["--mesh", "4"], marks=pytest.mark.slow),
        ["--mesh", "2x2", "--microbatches", "1"],
    ],
    ids=" ".join,
)
def test_on_another_mesh_and_with_other_microbatches(whole, tmp_path, arguments):
    folder = as_if_killed_after(whole, tmp_path, 3)
    train(tmp_path, *arguments, *EVERY)
    for row, expected in zip(metrics(folder), metrics(whole), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-6)


@pytest.mark.slow
def test_with_compressed_gradients_in_low_precision(tmp_path, capsys):
    arguments = ["--mesh", "2x2", "--precision", "fp16", "--compression", "onebit-adam"]
    arguments += ["--freeze-step", "2", *EVERY]
    whole = train(tmp_path, *arguments, name="whole")
    folder = as_if_killed_after(whole, tmp_path, 3)
    train(tmp_path, *arguments)
    assert_same_run(folder, whole)
    again = as_if_killed_after(whole, tmp_path, 3, name="again")
    arguments[1] = "4x2"
    capsys.readouterr()
    assert train(tmp_path, *arguments, name="again") == again
    assert "the blocks lie on other devices" in " ".join(capsys.readouterr().out.split())


def test_from_another_folder(whole, tmp_path, capsys):
    """A whole run, or one snapshot; also with another learning rate, as that is asked for."""
    one = whole / "snapshots" / "step-00000003"
    folder = train(tmp_path, "--mesh", "2", "--resume", str(one), name="one")
    assert [row["step"] for row in metrics(folder)] == [4, 5]
    assert metrics(folder)[-1]["loss"] == metrics(whole)[-1]["loss"]
    more = ["--mesh", "2", "--resume", str(whole), "--steps", "7", "--learning-rate", "0.001"]
    folder = train(tmp_path, *more, name="more")
    assert [row["step"] for row in metrics(folder)] == [6, 7]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "{whole}"], "taken after 5 steps, and --steps is 5"),
        (["--out", "{whole}", "--resume", "never"], "already holds a run"),
        (["--out", "{whole}", "--steps", "9", "--width", "32"], "--width 32 instead of 16"),
        (["--out", "{whole}", "--steps", "9", "--seed", "1"], "--seed 1 instead of 0"),
        (["--out", "{whole}", "--steps", "9", "--learning-rate", "1"], "--learning-rate 1.0"),
        (["--out", "{whole}", "--steps", "9", "--data", "{text}"], "belongs to other data"),
        (["--resume", "{nothing}"], "there is no snapshot"),
        (["--resume", "{whole}", "--model", "resnet18"], "--model resnet18 instead of gpt"),
        (["--snapshot-every-microbatches", "2"], "must be below --microbatches 2"),
        (
            ["--snapshot-every-microbatches", "1", "--mesh", "1x1x2"],
            "on --mesh 1x1x2 XLA divides the work",
        ),
        (["--keep-snapshots", "0"], "--keep-snapshots"),
        (["--snapshot-every-steps", "-1"], "--snapshot-every-steps"),
    ],
    ids=str,
)
def test_refuses(whole, tmp_path, capsys, arguments, said):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    places = {"whole": whole, "text": tmp_path / "text.txt", "nothing": tmp_path / "nothing"}
    filled = [argument.format(**places) for argument in arguments]
    before = (whole / "metrics.jsonl").read_bytes()
    small = SMALL if "resnet18" not in arguments else []
    assert main([*small, "--mesh", "2", "--platform", "cpu", *filled]) == 2
    assert said in capsys.readouterr().err
    assert (whole / "metrics.jsonl").read_bytes() == before


WITHIN = ["--mesh", "2", "--batch-size", "12", "--microbatches", "6"]
WITHIN += ["--snapshot-every-microbatches", "2", "--keep-snapshots", "99"]


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A run whose steps are taken in segments."""
    return train(tmp_path_factory.mktemp("cut"), *WITHIN, *EVERY[:2])


def test_segments_change_no_bit(cut, tmp_path):
    whole = train(tmp_path, *WITHIN[:6])
    assert_same_run(cut, whole)
    names = [path.name for path in snapshot_folders(cut / "snapshots")]
    assert names[:4] == [
        "step-00000000+2",
        "step-00000000+4",
        "step-00000000+6",
        "step-00000001",
    ]
    summary = json.loads((cut / "summary.json").read_text())
    assert [s["step"] for s in summary["snapshots"]][:4] == [0, 0, 0, 1]
    assert all(s["seconds_waited"] > 0 for s in summary["snapshots"])


def left_with(cut, tmp_path, last, name="run"):
    """A copy as if killed right after a snapshot."""
    folder = tmp_path / name
    shutil.copytree(cut, folder)
    found = snapshot_folders(folder / "snapshots")
    keep = [path.name for path in found].index(last)
    for path in found[keep + 1 :]:
        shutil.rmtree(path)
    (folder / "summary.json").unlink()
    return folder


@pytest.mark.parametrize("last", ["step-00000000+2", "step-00000002+4", "step-00000004+6"])
def test_goes_on_within_a_step_bit_by_bit(cut, tmp_path, capsys, last):
    folder = left_with(cut, tmp_path, last)
    assert train(tmp_path, *WITHIN, *EVERY[:2]) == folder
    step = int(last[5:13]) + 1
    assert f"going on within step {step}" in capsys.readouterr().out
    assert_same_run(folder, cut)


@pytest.mark.parametrize(
    "changed",
    [["--mesh", "3"], ["--schedule", "1f1b-overlap"], ["--snapshot-every-microbatches", "3"]],
    ids=" ".join,
)
def test_falls_back_to_the_start_of_the_step(cut, tmp_path, capsys, changed):
    folder = left_with(cut, tmp_path, "step-00000002+4")
    train(tmp_path, *WITHIN, *EVERY[:2], *changed)
    out = " ".join(capsys.readouterr().out.split())
    assert "going on after step 2" in out
    assert "about 4 microbatches later" in out
    for row, expected in zip(metrics(folder), metrics(cut), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-6)


def test_falls_back_if_the_table_was_edited(tmp_path, capsys):
    """The file has the same name; its ticks are others."""
    table, schedule = tmp_path / "table.csv", make_schedule("1f1b", 2, 6)
    write_schedule(schedule, table)
    arguments = [*WITHIN, *EVERY[:2], "--schedule", str(table)]
    before = train(tmp_path, *arguments, name="before")
    folder = left_with(before, tmp_path, "step-00000002+4")
    edited = [["", "", *row] for row in schedule_to_cells(schedule)]
    table.write_text("".join(",".join(row) + "\n" for row in edited))
    train(tmp_path, *arguments)
    assert "going on after step 2" in capsys.readouterr().out
    assert_same_run(folder, before)


def test_falls_back_if_it_is_to_be_taken_at_once(cut, tmp_path):
    folder = left_with(cut, tmp_path, "step-00000002+4")
    train(tmp_path, *WITHIN[:6], *EVERY[:2])
    assert_same_run(folder, cut)


def test_without_snapshots(tmp_path):
    folder = train(tmp_path, "--mesh", "2", "--snapshot-every-steps", "0")
    assert not (folder / "snapshots").exists()


FEW = [*WITHIN, "--keep-snapshots", "2", "--snapshot-errors", "go-on"]


def ended_within_a_step(tmp_path, monkeypatch, fails):
    """A run that gets SIGTERM within step 3, and the snapshots that it left."""
    save = SnapshotStore.save

    def saving(store, state, step, extra, *, microbatch=0):
        if (step, microbatch) == (2, 4):
            os.kill(os.getpid(), signal.SIGTERM)
        if fails and step == 2 and microbatch:
            raise SnapshotError("there is no room")
        return save(store, state, step, extra, microbatch=microbatch)

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotStore, "save", saving)
        assert main([*SMALL, *FEW, "--out", str(tmp_path / "run")]) == 143
    return [p.name for p in snapshot_folders(tmp_path / "run" / "snapshots")]


@pytest.mark.parametrize("fails", [False, True])
def test_no_batch_is_skipped_if_a_run_ends_within_a_step(tmp_path, monkeypatch, cut, fails):
    left = ended_within_a_step(tmp_path, monkeypatch, fails)
    assert left[-1] == ("step-00000002" if fails else "step-00000002+4")
    assert_same_run(train(tmp_path, *FEW), cut)


def test_what_a_run_goes_on_from_stays_until_there_is_more(tmp_path, monkeypatch):
    left = ended_within_a_step(tmp_path, monkeypatch, fails=False)
    assert all("+" in name for name in left)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Stepper, "take", interrupted)
    whole = [*WITHIN[:6], "--snapshot-every-steps", "1"]
    assert main([*SMALL, *whole, "--out", str(tmp_path / "run")]) == 130
    assert [p.name for p in snapshot_folders(tmp_path / "run" / "snapshots")] == left
