"""What dies is started again; what ends by itself is not; nothing is left behind."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jpipe.supervise import supervise


def script(tmp_path, code):
    """A command that counts its starts in a file."""
    path = tmp_path / "script.py"
    counts = f"""
import os, signal, sys, time
from pathlib import Path
folder = Path({str(tmp_path)!r})
with (folder / "starts").open("a") as file:
    file.write("x")
start = len((folder / "starts").read_text())
"""
    path.write_text(counts + textwrap.dedent(code))
    return [sys.executable, str(path)]


def run(tmp_path, code, max_restarts=3, **settings):
    said = []
    status = supervise(
        lambda: [script(tmp_path, code)],
        max_restarts=max_restarts,
        progress=lambda: sorted(p.name for p in tmp_path.glob("progress-*")),
        say=said.append,
        first_delay=0.01,
        **settings,
    )
    return status, len((tmp_path / "starts").read_text()), said


@pytest.mark.parametrize("status", [0, 1, 2, 130, 143])
def test_what_ends_by_itself_has_ended(tmp_path, status):
    assert run(tmp_path, f"sys.exit({status})") == (status, 1, [])


@pytest.mark.parametrize(
    ("death", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        ("os.abort()", "ended by SIGABRT"),
        ("sys.exit(70)", "status 70"),
        ("sys.exit(86)", "status 86"),
    ],
)
def test_what_dies_is_started_again(tmp_path, death, said):
    status, starts, lines = run(tmp_path, f"if start < 3: {death}")
    assert (status, starts) == (0, 3)
    assert said in lines[0]
    assert "restart 2 of 3" in lines[1]


def test_a_crash_loop_is_given_up(tmp_path):
    status, starts, lines = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (status, starts) == (137, 4)
    assert "no progress in 4 starts: giving up" in lines[-1]


def test_with_progress_the_count_begins_again(tmp_path):
    code = """
    (folder / f"progress-{start}").touch()
    if start < 9: os.kill(os.getpid(), signal.SIGKILL)
    """
    status, starts, lines = run(tmp_path, code, max_restarts=1)
    assert (status, starts) == (0, 9)
    assert all("restart 1 of 1" in line for line in lines)


def test_who_dies_after_everything_is_done_is_not_needed(tmp_path):
    code = "(folder / 'done').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    status, starts, lines = run(tmp_path, code, done=(tmp_path / "done").exists)
    assert (status, starts) == (0, 1)
    assert lines == ["it was ended by SIGKILL after everything was done"]


def test_delays_double(tmp_path):
    began = time.monotonic()
    _, _, lines = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", max_restarts=5)
    assert [line.split(" in ")[1].split(" ")[0] for line in lines[:-1]] == [
        "0.01",
        "0.02",
        "0.04",
        "0.08",
        "0.16",
    ]
    assert time.monotonic() - began < 20


def test_what_is_stopped_is_killed_and_started_again(tmp_path):
    code = "if start == 1: os.kill(os.getpid(), signal.SIGSTOP)"
    status, starts, lines = run(tmp_path, code, patience=0.3)
    assert (status, starts) == (0, 2)
    assert "stopped for 0.3 s" in lines[0]


SUPERVISOR = """
import sys
from jpipe.supervise import supervise
command = {command!r}
sys.exit(supervise(lambda: [command], max_restarts=3, progress=lambda: 0, say=print))
"""


def start_supervisor(tmp_path, code):
    """In a session of its own, as a terminal would start it."""
    command = script(tmp_path, code)
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR.format(command=command)], start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process, int((tmp_path / "pid").read_text())


def wait_until_gone(pid):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("an orphan is left")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_handed_on_and_end_it(tmp_path, number):
    code = f"""
    def end(*_):
        (folder / "heard").touch()
        sys.exit(7)
    signal.signal({int(number)}, end)
    (folder / "part").write_text(str(os.getpid()))
    os.replace(folder / "part", folder / "pid")
    time.sleep(60)
    """
    process, pid = start_supervisor(tmp_path, code)
    process.send_signal(number)
    assert process.wait(timeout=20) == 7
    assert (tmp_path / "heard").exists()
    wait_until_gone(pid)


def test_ctrl_c_in_a_terminal_is_heard_once(tmp_path):
    """A terminal sends it to the whole process group; a second one would mean: at once."""
    code = """
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    (folder / "part").write_text(str(os.getpid()))
    os.replace(folder / "part", folder / "pid")
    end = time.monotonic() + 60
    while not heard and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(1)
    sys.exit(10 + len(heard))
    """
    process, pid = start_supervisor(tmp_path, code)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=70) == 11
    wait_until_gone(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_was_asked_to_end_has_ended(tmp_path, number):
    code = f"signal.signal({int(number)}, signal.SIG_DFL); os.kill(os.getpid(), {int(number)})"
    assert run(tmp_path, code) == (128 + number, 1, [])


def test_what_was_there_before_is_no_progress(tmp_path):
    """As a snapshot that is damaged, and written anew in each start."""
    code = """
    (folder / f"progress-{start % 2}").touch()
    (folder / f"progress-{1 - start % 2}").unlink(missing_ok=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    status, starts, _ = run(tmp_path, code, max_restarts=2)
    assert (status, starts) == (137, 3)


def test_no_orphan_is_left_if_the_supervisor_is_killed(tmp_path):
    code = """
    from jpipe.supervise import end_with_supervisor, is_supervised
    assert is_supervised()
    end_with_supervisor()
    (folder / "part").write_text(str(os.getpid()))
    os.replace(folder / "part", folder / "pid")
    time.sleep(60)
    """
    process, pid = start_supervisor(tmp_path, code)
    process.kill()
    process.wait()
    wait_until_gone(pid)


def together(tmp_path, code, count=3, **settings):
    """Several processes that know their number and how often they were started."""
    said, starts = [], itertools.count(1)

    def commands():
        start = next(starts)
        header = f"import os, signal, sys, time\nfrom pathlib import Path\nstart = {start}\n"
        header += f"folder = Path({str(tmp_path)!r})\n"
        body = textwrap.dedent(code)
        return [[sys.executable, "-c", f"{header}number = {k}\n{body}"] for k in range(count)]

    begun = time.monotonic()
    status = supervise(
        commands,
        max_restarts=2,
        progress=lambda: 0,
        say=said.append,
        first_delay=0.01,
        **settings,
    )
    return status, next(starts) - 1, said, time.monotonic() - begun


@pytest.mark.parametrize(
    "death", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(86)", "sys.exit(70)"]
)
@pytest.mark.parametrize("number", [0, 2])
def test_if_one_dies_all_are_started_again(tmp_path, death, number):
    code = f"""
    if start == 1:
        if number == {number}: {death}
        (folder / f"pid-{{number}}").write_text(str(os.getpid()))
        time.sleep(100)
    """
    status, starts, _, seconds = together(tmp_path, code)
    assert (status, starts) == (0, 2)
    assert seconds < 30
    for path in tmp_path.glob("pid-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_if_one_is_stopped_all_are_started_again(tmp_path):
    code = """
    if start == 1:
        if number == 1: os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(100)
    """
    status, starts, said, _ = together(tmp_path, code, patience=0.5)
    assert (status, starts) == (0, 2)
    assert "was stopped for 0.5 s: killing it" in said[0]


def test_the_others_end_with_one_that_was_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("jpipe.supervise._GRACE", 0.5)
    code = "sys.exit(2) if number == 0 else time.sleep(100)"
    status, starts, _, seconds = together(tmp_path, code)
    assert (status, starts) == (2, 1)
    assert seconds < 30


def test_one_may_end_long_before_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("jpipe.supervise._GRACE", 0.1)
    assert together(tmp_path, "time.sleep(1.5 * number)")[:3] == (0, 1, [])
