"""How much memory a process asks the system for while it runs something (Linux)."""

import ctypes
import gc
import pathlib
import re
from collections.abc import Callable
from typing import Any

PROC = pathlib.Path("/proc/self")


def resident_growth(run: Callable[[], Any]) -> int:
    """Bytes by which the resident memory of this process peaks while `run` runs."""
    gc.collect()
    # What was freed before must not hide what is needed now.
    ctypes.CDLL(None).malloc_trim(0)
    (PROC / "clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", (PROC / "status").read_text())
    assert found
    return 1024 * int(found[1])
