"""Eight simulated devices for all tests, set before any of them touches JAX."""

import atexit
import os
import shutil
import tempfile

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jpipe-tests-")  # not the user's own cache
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

from jpipe.mesh import simulate_devices  # noqa: E402 the platform must be set before

simulate_devices(8)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(autouse=True)
def _restore_jax_config():
    """The command sets a compilation cache and a default device: not for the tests after it."""
    import jax

    names = ("jax_compilation_cache_dir", "jax_default_device")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(autouse=True)
def _forget_compilations():
    """Each test counts its own compilations, and so does what a module prepares for its tests."""
    from jpipe.pipeline import retrace

    retrace._compiled.clear()
    yield
    retrace._compiled.clear()
