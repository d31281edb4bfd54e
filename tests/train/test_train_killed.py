"""SIGKILL where it hurts: between microbatches, while a snapshot is written, while XLA compiles."""

import contextlib
import json
import time

import pytest
from train.test_train_resume import assert_same_run
from train.test_train_run import metrics, run_command, train

pytestmark = pytest.mark.slow

STEPS = ["--mesh", "2", "--steps", "6", "--keep-snapshots", "99"]
M5 = [*STEPS, "--batch-size", "5", "--microbatches", "5", "--snapshot-every-microbatches", "1"]
M16 = [*STEPS, "--batch-size", "16", "--microbatches", "16", "--snapshot-every-microbatches", "5"]
EACH = [*STEPS, "--snapshot-every-steps", "1"]


def kill_when(tmp_path, arguments, now):
    """Start the command, and kill it as soon as it is time; how it ended."""
    process = run_command(tmp_path, *arguments, "--out", "run")
    began, snapshots = time.monotonic(), tmp_path / "run" / "snapshots"
    before = {p.name for p in snapshots.iterdir()} if snapshots.exists() else set()
    while process.poll() is None:
        names = set()
        with contextlib.suppress(FileNotFoundError):
            names = {p.name for p in snapshots.iterdir()} - before
        if now(names, time.monotonic() - began):
            break
        time.sleep(0.001)
    process.kill()
    process.communicate()
    return process.returncode


def finish(tmp_path, arguments):
    process = run_command(tmp_path, *arguments, "--out", "run")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return tmp_path / "run", out


@pytest.mark.parametrize(
    ("arguments", "last"),
    [(M5, "step-00000000+1"), (M5, "step-00000003+4"), (M16, "step-00000002+5")],
    ids=["M5 first", "M5", "M16"],
)
def test_between_microbatches(arguments, last, tmp_path):
    whole = train(tmp_path, *arguments, name="whole")
    assert kill_when(tmp_path, arguments, lambda names, _: last in names) == -9
    folder, out = finish(tmp_path, arguments)
    assert "going on within step" in out
    assert_same_run(folder, whole)
    assert [row["step"] for row in metrics(folder)] == list(range(1, 7))


@pytest.mark.parametrize("arguments", [EACH, M5], ids=["steps", "microbatches"])
def test_during_a_save(arguments, tmp_path):
    whole = train(tmp_path, *arguments, name="whole")
    for count in (1, 3, 2):
        done = []

        def writing(names, _, count=count, done=done):
            done[:] = [name for name in names if name.startswith("step-")]
            return len(done) >= count and len(names) > len(done)

        assert kill_when(tmp_path, arguments, writing) in (-9, 0, 2)
    folder = tmp_path / "run"
    if not (folder / "summary.json").exists():
        folder, _ = finish(tmp_path, arguments)
    assert_same_run(folder, whole)
    assert all(p.name.startswith("step-") for p in (folder / "snapshots").iterdir())


def test_during_compile(tmp_path):
    whole = train(tmp_path, *EACH, name="whole")
    for seconds in (2.0, 3.0, 4.0):
        kill_when(tmp_path, EACH, lambda names, passed, s=seconds: passed > s or names)
    folder, _ = finish(tmp_path, EACH)
    assert_same_run(folder, whole)
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6
