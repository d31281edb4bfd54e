"""A module imports only from its own floor's package or from lower floors."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jpipe

ROOT = Path(jpipe.__file__).parent

FLOOR = {
    "jpipe": 0,
    "jpipe.cli": 0,
    "jpipe.files": 0,
    "jpipe.integrity": 0,
    "jpipe.memory": 0,
    "jpipe.mesh": 0,
    "jpipe.precision": 0,
    "jpipe.processes": 0,
    "jpipe.schedule": 0,
    "jpipe.targets": 0,
    "jpipe.watchdog": 0,
    "jpipe.optim": 1,
    "jpipe.pipeline": 1,
    "jpipe.reference": 1,
    "jpipe.adapters": 2,
    "jpipe.data": 2,
    "jpipe.models": 2,
    "jpipe.snapshot": 3,
    "jpipe.train_step": 3,
    "jpipe.supervise": 4,
    "jpipe.train": 5,
}

# Outside packages that only some rooms may use.
RESERVED = {
    "flax": {"jpipe.adapters", "jpipe.models", "jpipe.train"},
    "orbax": {"jpipe.snapshot"},
    "grain": {"jpipe.data", "jpipe.train"},
    "argparse": {"jpipe.cli", "jpipe.schedule", "jpipe.train"},
    "matplotlib": {"jpipe.schedule", "jpipe.train"},
    "rich": {"jpipe.schedule", "jpipe.train"},
}


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module):
    """The entry of FLOOR that a module belongs to."""
    while module not in FLOOR:
        module, _, _ = module.rpartition(".")
    return module


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down(path):
    here = room(module_name(path))
    for name in imports(path):
        if not name.startswith("jpipe"):
            continue
        there = room(name)
        if there == here or there == "jpipe":
            continue
        assert FLOOR[there] <= FLOOR[here], f"{module_name(path)} imports {name}"
        # Neither of the two may know the other: one is held against the other.
        assert {here, there} != {"jpipe.reference", "jpipe.pipeline"} or here == "jpipe.reference"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_reserved_packages(path):
    here = room(module_name(path))
    for name in imports(path):
        package = name.partition(".")[0]
        assert here in RESERVED.get(package, {here}), f"{module_name(path)} imports {name}"
        assert "._src" not in name, f"{module_name(path)} imports {name}"
        if here == "jpipe.schedule":
            assert package != "jax", f"{module_name(path)} imports {name}"


def test_the_oracle_knows_the_contract_only():
    names = {name for name in imports(ROOT / "reference.py") if name.startswith("jpipe.")}
    contract = ("jpipe.pipeline.stages", "jpipe.pipeline.losses", "jpipe.pipeline.keys")
    assert all(name.startswith(contract) for name in names)


def test_importing_starts_no_backend():
    code = (
        "import jpipe.train.__main__, jpipe.schedule.__main__, sys\n"
        "from jax.extend import backend\n"
        "import jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"  # raises once a backend has started
        "assert jax.device_count('cpu') == 3\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"JAX_PLATFORMS": "cpu", "PATH": ""}
    )
