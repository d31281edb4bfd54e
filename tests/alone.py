"""Code that needs a process of its own, such as one with float64 on."""

import subprocess
import sys
import textwrap


def printed(code):
    """The words that the code prints."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()
