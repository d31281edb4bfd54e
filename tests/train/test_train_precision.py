"""The command in low precision, and with compressed gradients."""

import json

import pytest
from train.test_train_run import SMALL, alone, metrics, train  # noqa: F401 a fixture

from jpipe.train.__main__ import main

METHODS = ["none", "bf16", "fp16", "int8", "onebit", "powersgd"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_as_float32_does(precision, alone, tmp_path, capsys):  # noqa: F811
    rows = metrics(train(tmp_path, "--mesh", "2", "--precision", precision))
    for row, expected in zip(rows, metrics(alone), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-3)
        assert row.get("loss_scale") == (2.0**16 if precision == "fp16" else None)
    out = capsys.readouterr().out
    assert f"activations {'bfloat16' if precision == 'bf16' else 'float16'}" in out
    assert ("dynamic loss scale" in out) == (precision == "fp16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "int8"),
        "int8",
        "onebit-adam",
    ],
)
def test_compression_trains(method, alone, tmp_path, capsys):  # noqa: F811
    """Two steps are equal: the first, and the loss after it but for what was lost."""
    rows = metrics(train(tmp_path, "--mesh", "2x2", "--compression", method))
    expected = metrics(alone)
    assert len(rows) == len(expected)
    assert rows[0]["loss"] == pytest.approx(expected[0]["loss"], rel=2e-6)
    assert rows[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=2e-2)
    out = capsys.readouterr().out
    assert ("compressed by" in out) == (method != "none")
    assert ("momentum" in out) == (method == "onebit-adam")


def test_all_of_it_together(tmp_path):
    folder = train(
        tmp_path,
        *["--mesh", "2x2", "--precision", "fp16", "--compression", "onebit-adam"],
        *["--freeze-step", "2"],
    )
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["loss"] < 5.7 and row["grad_norm"] > 0 for row in rows)
    assert json.loads((folder / "summary.json").read_text())["skipped_steps"] == 0


def test_a_model_that_diverges_skips_steps_and_then_ends(tmp_path, capsys):
    """float16, and a rate that no scale can mend: no crawl for ever, and valid JSON."""
    folder = tmp_path / "run"
    arguments = [*SMALL, "--steps", "100", "--precision", "fp16", "--learning-rate", "1e30"]
    arguments += ["--eval-every", "0"]
    assert main([*arguments, "--mesh", "2", "--out", str(folder)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "error: step" in out
    assert "loss scale is down to 1" in out
    rows = metrics(folder)
    skipped = [row for row in rows if row.get("skipped")]
    assert len(skipped) >= 20
    assert skipped[-1]["loss_scale"] == 1.0
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
