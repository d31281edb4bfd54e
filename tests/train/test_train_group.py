"""Processes that one command starts together: what happens to one of them is made good."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train.test_train_resume import assert_same_run
from train.test_train_run import metrics
from train.test_train_signals import wait_for_lines

GROUP = """
--layers 4 --width 16 --heads 2 --context 16 --batch-size 8 --microbatches 4 --steps 300
--eval-every 0 --platform cpu --mesh 2 --num-processes 2 --snapshot-every-steps 20
--max-restarts 3 --comm-timeout 20
""".split()

# Once a file says so, process 1 waits for ever, with Python's lock held: its watchdog does, too.
WEDGE = """
import ctypes, os, sys, threading, time
def wait():
    while not os.path.exists({file!r}):
        time.sleep(0.05)
    os.remove({file!r})
    ctypes.PyDLL(None).pause()
if sys.argv[-2:] == ["--process-id", "1"]:
    threading.Thread(target=wait, daemon=True).start()
"""

# The disk is full when step 25 is to be logged.
FULL = """
import errno, io, os, pathlib
class Full(io.FileIO):
    def write(self, data):
        if b'"step": 25,' in data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)
        return super().write(data)
opened = pathlib.Path.open
def open(self, mode="r", buffering=-1, **rest):
    if self.name == "metrics.jsonl" and "a" in mode:
        return Full(self, mode.replace("b", ""))
    return opened(self, mode, buffering, **rest)
pathlib.Path.open = open
"""


def start(folder, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "jpipe.train", *GROUP, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | environment,
    )


def workers(process):
    """Process ids of its children, in the order of their numbers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children]


def end(process):
    """Whatever has become of it."""
    if process.poll() is None:
        for pid in workers(process):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = start(folder)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return folder


def kill(pids, tmp_path):
    os.kill(pids[1], signal.SIGKILL)


def kill_first(pids, tmp_path):
    os.kill(pids[0], signal.SIGKILL)


def stop(pids, tmp_path):
    os.kill(pids[1], signal.SIGSTOP)


def wedge(pids, tmp_path):
    (tmp_path / "wedge").touch()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [kill, kill_first, stop, wedge])
def test_the_group_recovers(fault, whole, tmp_path):
    folder, site = tmp_path / "run", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WEDGE.format(file=str(tmp_path / "wedge")))
    process = start(folder, PYTHONPATH=str(site))
    try:
        wait_for_lines(process, folder, 50)
        pids = workers(process)
        fault(pids, tmp_path)
        out, _ = process.communicate(timeout=300)
    finally:
        end(process)
    assert process.returncode == 0, out
    assert "supervisor: it " in out
    assert "going on after step" in out
    assert_same_run(folder, whole)
    assert [row["step"] for row in metrics(folder)] == list(range(1, 301))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["supervisor", 0, 1])
def test_sigterm_ends_the_group_with_a_snapshot(who, whole, tmp_path):
    """Also if only one of the processes hears of it."""
    folder = tmp_path / "run"
    process = start(folder)
    try:
        wait_for_lines(process, folder, 30)
        pids = workers(process)
        os.kill(process.pid if who == "supervisor" else pids[who], signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == 143, out
    newest = sorted((folder / "snapshots").iterdir())[-1]
    assert newest.name == f"step-{metrics(folder)[-1]['step']:08d}"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    process = start(folder)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert_same_run(folder, whole)


@pytest.mark.slow
def test_a_full_disk_in_one_process_ends_all(tmp_path):
    """With its own status, and without waiting for each other."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(FULL)
    process = start(tmp_path / "run", PYTHONPATH=str(site))
    try:
        wait_for_lines(process, tmp_path / "run", 20)
        began = time.monotonic()
        out, _ = process.communicate(timeout=100)
    finally:
        end(process)
    assert process.returncode == 1, out
    assert "No space left on device" in out
    assert "starting it again" not in out
    assert time.monotonic() - began < 60
