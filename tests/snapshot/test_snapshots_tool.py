"""The inspector of snapshots."""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import pytest

from jpipe.snapshot import SnapshotStore

FILE = Path(__file__).parents[2] / "tools" / "snapshots.py"
spec = importlib.util.spec_from_file_location("snapshots", FILE)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.fixture
def run(tmp_path):
    store = SnapshotStore(tmp_path / "snapshots")
    for step in (1, 2):
        state = {"a": jnp.arange(6.0).reshape(2, 3) * step, "b": jnp.ones(2)}
        store.save(state, step, {"taken": "now"})
    store.close()
    return tmp_path


def test_list(run, capsys):
    assert tool.main(["list", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step-00000001" in out
    assert "step-00000002" in out
    assert " 8 " in out
    assert "now" in out


def test_verify(run, capsys):
    assert tool.main(["verify", str(run / "snapshots")]) == 0
    assert capsys.readouterr().out.count("good") == 2
    manifest = run / "snapshots" / "step-00000002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 2', b'"step": 3'))
    assert tool.main(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert "step-00000001: good" in out
    assert "step-00000002: damaged: the manifest's checksum is wrong" in out
    assert tool.main(["list", str(run)]) == 0
    assert "damaged" in capsys.readouterr().out


def test_diff(run, capsys):
    one, two = (run / "snapshots" / f"step-0000000{k}" for k in (1, 2))
    assert tool.main(["diff", str(one), str(two)]) == 0
    out = capsys.readouterr().out
    assert "['a']" in out
    assert "5" in out
    assert "['b']" not in out
    assert tool.main(["diff", str(one), str(one)]) == 0
    assert "equal" in capsys.readouterr().out


def test_nothing_there(tmp_path, capsys):
    assert tool.main(["list", str(tmp_path)]) == 2
    assert "holds no snapshots" in capsys.readouterr().err
