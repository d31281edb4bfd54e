"""A virtual environment for each framework: their requirements exclude each other."""

import pathlib
import subprocess
import sys
import venv

REPOSITORY = pathlib.Path(__file__).parents[2]
REQUIREMENTS = {
    "jax": [f"--editable={REPOSITORY}", "jax==0.10.2", "jaxlib==0.10.2"],
    "torch": ["torch==2.13.0", "numpy==2.4.6"],
    # Later versions of SpectraX fail with default placement, and this one with a later JAX.
    "spectrax": ["spectrax-lib==0.1.3", "jax==0.10.0", "jaxlib==0.10.0"],
}


def python_with(framework: str, folder: pathlib.Path) -> pathlib.Path:
    """The interpreter of a framework's environment, which is made if it is not there.

    Args:
        framework: one of `REQUIREMENTS`.
        folder: where the environments are.

    Raises:
        RuntimeError: if the framework cannot be installed; with the last words of pip.
    """
    home = folder / framework
    python, done = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join(REQUIREMENTS[framework])
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"installing {framework} into {home}", file=sys.stderr, flush=True)
    venv.create(home, clear=True, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[framework]]
    result = subprocess.run(pip, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        raise RuntimeError(f"pip cannot install {framework}: {result.stderr.strip()[-300:]}")
    done.write_text(wanted)
    return python
