"""Bad input to the command: one message with argument, value and remedy; exit 2; no compile."""

import numpy as np
import pytest

from jpipe.train import run
from jpipe.train.__main__ import main

CASES = {
    "unknown option": (["--frobnicate", "3"], ["--frobnicate", "--help"]),
    "unknown value": (["--schedule", "2f2b"], ["--schedule", "2f2b", "1f1b"]),
    "abbreviated option": (["--step", "3"], ["--step"]),
    "no number": (["--steps", "many"], ["--steps", "many", "whole number"]),
    "negative": (["--batch-size", "-4"], ["--batch-size", "-4"]),
    "huge": (["--width", "9" * 26, "--heads", "1"], ["--width", "9" * 26, "below 2^31"]),
    "huge seed": (["--seed", "9" * 26], ["--seed", "below 2^31"]),
    "learning rate": (["--learning-rate", "0"], ["--learning-rate", "above 0"]),
    "learning rate nan": (["--learning-rate", "nan"], ["--learning-rate", "nan"]),
    "no stages": (["--mesh", "0"], ["mesh='0'", "at least 1"]),
    "no mesh": (["--mesh", "four"], ["mesh='four'", "stage=4,data=2"]),
    "model axis": (
        ["--mesh", "1x1x3", "--width", "16", "--heads", "2", "--platform", "cpu"],
        ["annotated", "16 does not divide over 3"],
    ),
    "unknown axis": (["--mesh", "stage=2,expert=2"], ["expert"]),
    "axis twice": (["--mesh", "stage=2,stage=4"], ["stage=2,stage=4"]),
    "more stages than layers": (
        ["--mesh", "8", "--layers", "4"],
        ["--mesh 8", "4 layers cannot be cut into 8", "at most 4"],
    ),
    "more stages than blocks": (
        ["--mesh", "10", "--model", "resnet18", "--platform", "cpu"],
        ["10 devices"],
    ),
    "no images": (["--model", "resnet18", "--data", "{empty}"], ["empty.txt", ".npz"]),
    "two files of images": (["--model", "resnet18", "--data", "a", "b"], ["one .npz file"]),
    "option of another model": (
        ["--model", "resnet18", "--layers", "4"],
        ["--layers is for --model gpt", "resnet18"],
    ),
    "cpu processes by themselves": (
        ["--distributed", "--platform", "cpu"],
        ["--distributed", "--num-processes"],
    ),
    "too large a microbatch": (
        ["--model", "resnet18", "--batch-size", "2000", "--microbatches", "10"],
        ["200", "179 images"],
    ),
    "processes that cannot share a machine": (
        ["--num-processes", "2"],
        ["--num-processes 2 without --coordinator", "--platform cpu"],
    ),
    "half a connection": (["--num-processes", "2", "--process-id", "0"], ["coordinator missing"]),
    "no such process": (
        ["--num-processes", "2", "--process-id", "2", "--coordinator", "localhost:1"],
        ["process_id=2", "between 0 and num_processes - 1 = 1"],
    ),
    "no port": (
        ["--num-processes", "2", "--process-id", "1", "--coordinator", "localhost"],
        ["coordinator='localhost'", "host:port"],
    ),
    "mesh and processes": (
        ["--mesh", "3", "--num-processes", "2", "--process-id", "1"],
        ["--mesh 3", "--num-processes 2"],
    ),
    "batch": (
        ["--batch-size", "10", "--microbatches", "4"],
        ["--batch-size 10", "4 x 1", "8 or 12"],
    ),
    "precision": (["--precision", "fp8"], ["--precision", "fp8", "bf16"]),
    "compression": (["--compression", "zip"], ["--compression", "zip", "onebit-adam"]),
    "freeze step of nothing": (
        ["--freeze-step", "5", "--compression", "int8"],
        ["--freeze-step 5", "onebit-adam", "int8"],
    ),
    "no freeze step": (["--freeze-step", "0"], ["--freeze-step", "0"]),
    "hasty timeout": (["--comm-timeout", "0.1"], ["--comm-timeout", "0.1", "at least 0.5"]),
    "batch over data": (
        ["--batch-size", "12", "--microbatches", "4", "--mesh", "2x2"],
        ["--batch-size 12", "4 x 2 = 8", "8 or 16"],
    ),
    "heads": (["--width", "30", "--heads", "4"], ["width=30", "heads=4", "32"]),
    "context": (["--context", "1000000"], ["context=1000000"]),
    "no file": (["--data", "nowhere.txt"], ["nowhere.txt"]),
    "tokens without vocabulary": (["--data", "{tokens}"], ["vocab_size", ".npy"]),
    "token outside": (["--data", "{tokens}", "--vocab-size", "100"], ["100", "tokens.npy"]),
    "empty file": (["--data", "{empty}"], ["empty.txt"]),
    "folder as file": (["--data", "{folder}"], ["{folder}"]),
    "vocabulary of bytes": (["--vocab-size", "100"], ["vocab_size=100", "256"]),
    "out below a file": (["--out", "{empty}/run"], ["--out", "empty.txt", "choose"]),
    "out in use": (["--out", "{used}"], ["--out", "used", "already holds a run"]),
    "no gpu": (["--platform", "gpu"], ["platform='gpu'", "4 devices", "--platform cpu"]),
    "no tpu": (["--platform", "tpu"], ["platform='tpu'", "--platform cpu"]),
    "too many simulated": (["--mesh", "16", "--layers", "16"], ["16 devices"]),
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "empty.txt").touch()
    np.save(tmp_path / "tokens.npy", np.arange(5000) % 300)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("{}\n")
    return {
        "empty": str(tmp_path / "empty.txt"),
        "tokens": str(tmp_path / "tokens.npy"),
        "used": str(tmp_path / "used"),
        "folder": str(tmp_path),
    }


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, files, tmp_path, monkeypatch, capsys):
    arguments, expected = CASES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.Run, "execute", lambda self: pytest.fail("went on"))
    status = main([argument.format(**files) for argument in arguments])
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    for part in expected:
        assert part.format(**files) in err
    assert not (tmp_path / "runs").exists(), "a refused run leaves nothing behind"
