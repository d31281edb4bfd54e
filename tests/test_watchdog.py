"""What makes no progress is named and ended."""

import signal
import subprocess
import sys
import time

import pytest

from jpipe.cli import WEDGED
from jpipe.watchdog import Watchdog

STUCK = """
import time
from jpipe.watchdog import Watchdog
watchdog = Watchdog(0.5)
with watchdog.watch("step 11"):
    watchdog.note("tick 3 of 38")
time.sleep(1)  # nothing is watched here
def a_place_to_be_stuck_in():
    time.sleep(60)
with watchdog.watch("step 12"):
    watchdog.note("tick 8 of 38")
    a_place_to_be_stuck_in()
"""


def test_what_is_stuck_is_ended_with_its_stacks():
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=50)
    assert run.returncode == WEDGED
    assert time.monotonic() - began < 30
    expected = "step 12 was not done after 0.5 s (the last known of it: tick 8 of 38): a device"
    assert expected in run.stderr
    assert "a_place_to_be_stuck_in" in run.stderr
    assert "step 11" not in run.stderr
    assert "tick 3" not in run.stderr


PATIENT = """
import time
from jpipe.watchdog import Watchdog
watchdog = Watchdog(0.5)
with watchdog.watch("the start", at_least=4):
    time.sleep(1.5)
with watchdog.watch_others("a slow disk"):
    time.sleep(1.5)  # nobody else is waited for
with watchdog.watch("the end", at_least=1):
    time.sleep(60)
"""


def test_some_pieces_have_more_time():
    run = subprocess.run(
        [sys.executable, "-c", PATIENT], capture_output=True, text=True, timeout=50
    )
    assert run.returncode == WEDGED
    assert "the end was not done after 1 s" in run.stderr


STOPPED = """
import time
from jpipe.watchdog import Watchdog
watchdog = Watchdog(2.0)
with watchdog.watch("a step"):
    print("now", flush=True)
    time.sleep(1.0)
print("done", flush=True)
"""


def test_while_the_process_is_stopped_no_time_passes():
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=50)
    assert (process.returncode, out) == (0, "done\n")


def test_off():
    watchdog = Watchdog(None)
    with watchdog.watch("anything"):
        pass
    watchdog.close()


def test_refuses():
    with pytest.raises(ValueError, match=r"seconds=0\.1 must be at least 0\.5"):
        Watchdog(0.1)
