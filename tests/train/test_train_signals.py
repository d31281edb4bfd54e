"""Real processes that are asked to end, killed or stopped: nothing is lost, and they go on."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from train.test_train_resume import assert_same_run
from train.test_train_run import metrics, run_command, train

from jpipe.snapshot import snapshot_folders

LONG = ["--mesh", "2", "--steps", "40", "--eval-every", "15", "--snapshot-every-steps", "5"]


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run that nothing disturbed."""
    return train(tmp_path_factory.mktemp("long"), *LONG)


def wait_for_lines(process, folder, count):
    path, deadline = folder / "metrics.jsonl", time.monotonic() + 180
    while not (path.exists() and path.read_text().count("\n") >= count):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sigterm_takes_a_snapshot_and_says_so(long, tmp_path):
    process = run_command(tmp_path, *LONG, "--out", "run", "--steps", "4000")
    wait_for_lines(process, tmp_path / "run", 7)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143, out
    assert "Traceback" not in out
    rows = metrics(tmp_path / "run")
    newest = sorted((tmp_path / "run" / "snapshots").iterdir())[-1]
    assert newest.name == f"step-{rows[-1]['step']:08d}"
    assert not (tmp_path / "run" / "summary.json").exists()


def test_sigterm_during_the_start_ends_at_once(tmp_path):
    """A compile cannot be interrupted, and there is nothing to write yet."""
    process = run_command(
        tmp_path, *LONG, "--out", "run", "--layers", "24", XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "schedule.png").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143, out
    assert time.monotonic() - asked < 3
    assert "before there was anything to write" in out


def worker_of(supervisor):
    """The process that a supervisor watches."""
    children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
    return int(children.read_text().split()[0])


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_run_is_started_again_by_itself(long, tmp_path, number):
    process = run_command(
        tmp_path, *LONG, "--out", "run", "--max-restarts", "2", "--comm-timeout", "5"
    )
    wait_for_lines(process, tmp_path / "run", 7)
    while not snapshot_folders(tmp_path / "run" / "snapshots"):
        time.sleep(0.01)
    os.kill(worker_of(process), number)
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out
    assert "supervisor: it was ended by SIGKILL; starting it again" in out
    assert "going on after step" in out
    assert_same_run(tmp_path / "run", long)


def test_sigterm_to_a_supervisor_takes_a_snapshot_too(tmp_path):
    process = run_command(tmp_path, *LONG, "--out", "run", "--steps", "4000", "--max-restarts", "2")
    wait_for_lines(process, tmp_path / "run", 3)
    worker = worker_of(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143, out
    assert not Path(f"/proc/{worker}").exists()
    newest = snapshot_folders(tmp_path / "run" / "snapshots")[-1]
    assert newest.name == f"step-{metrics(tmp_path / 'run')[-1]['step']:08d}"


def kill_and_go_on(tmp_path, kills, seed):
    """Kill a run at random instants, each time a while after it began, and let it go on."""
    rng = random.Random(seed)
    for _ in range(kills):
        process = run_command(tmp_path, *LONG, "--out", "run")
        began = time.monotonic()
        delay = rng.uniform(0.5, 12.0)
        while process.poll() is None and time.monotonic() - began < delay:
            time.sleep(0.005)
        process.kill()
        out, _ = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0, 2), out
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0 or "nothing is left to do" in out
    process = run_command(tmp_path, *LONG, "--out", "run")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 or "nothing is left to do" in out, out
    return tmp_path / "run"


def test_killed_at_random_instants(long, tmp_path):
    assert_same_run(kill_and_go_on(tmp_path, 2, seed=0), long)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_killed_again_and_again(long, tmp_path, seed):
    """Thirty kills in all."""
    assert_same_run(kill_and_go_on(tmp_path, 3, seed), long)
