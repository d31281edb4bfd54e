"""The command itself, at a small size."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import flax.serialization
import jax
import numpy as np
import pytest
from flax import nnx

from jpipe.data import load_images
from jpipe.models import (
    GPT,
    GPTConfig,
    ResNet,
    ResNetConfig,
    classification_loss,
    next_token_loss,
)
from jpipe.train.__main__ import main
from jpipe.train.options import TrainOptions, parse_options
from jpipe.train.run_folder import RunFolder

SMALL = """
--layers 4 --width 16 --heads 2 --context 16 --batch-size 4 --microbatches 2 --steps 5
--eval-every 2
""".split()


def train(tmp_path, *arguments, name="run"):
    folder = tmp_path / name
    assert main([*SMALL, "--out", str(folder), *arguments]) == 0
    return folder


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run on one device."""
    return train(tmp_path_factory.mktemp("alone"), "--mesh", "1")


def test_leaves_everything(alone):
    names = {path.name for path in alone.iterdir()}
    assert names == {
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "params.msgpack",
        "sample.txt",
        "schedule.png",
        "snapshots",
        "summary.json",
    }
    rows = metrics(alone)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["tokens_per_s"] > 0
    assert [row["step"] for row in rows if "validation_loss" in row] == [2, 4]
    config = json.loads((alone / "config.json").read_text())
    assert config["layers"] == 4
    assert config["versions"]["jax"] == jax.__version__
    assert len((alone / "sample.txt").read_bytes()) > 200
    for picture in ("loss.png", "schedule.png"):
        assert (alone / picture).read_bytes().startswith(b"\x89PNG")


def test_first_loss_is_that_of_a_uniform_guess(alone):
    assert metrics(alone)[0]["loss"] == pytest.approx(math.log(256), abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--mesh", "4"],
        ["--mesh", "2x2"],
        ["--mesh", "stage=2", "--schedule", "interleaved"],
        ["--mesh", "stage=2", "--schedule", "zero-bubble-v"],
        ["--mesh", "2", "--schedule", "1f1b-overlap", "--recompute", "stage"],
        ["--mesh", "2", "--microbatches", "4", "--recompute", "block"],
        ["--mesh", "3"],
        ["--mesh", "2x2x2"],
    ],
    ids=" ".join,
)
def test_same_numbers_on_every_mesh_and_schedule(arguments, alone, tmp_path):
    rows = metrics(train(tmp_path, *arguments))
    for row, expected in zip(rows, metrics(alone), strict=True):
        assert row.keys() == expected.keys()
        for name in row.keys() & {"loss", "grad_norm", "validation_loss"}:
            assert row[name] == pytest.approx(expected[name], rel=2e-6), name


def test_another_seed_is_another_run(alone, tmp_path):
    rows = metrics(train(tmp_path, "--mesh", "1", "--seed", "1"))
    assert rows[0]["loss"] != metrics(alone)[0]["loss"]


def test_parameters_load_without_jpipe(alone):
    plain = flax.serialization.msgpack_restore((alone / "params.msgpack").read_bytes())
    config = GPTConfig(vocab_size=256, context=16, layers=4, width=16, heads=2)
    model = GPT(config, rngs=nnx.Rngs(9))
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, plain)
    nnx.update(model, state)
    summary = json.loads((alone / "summary.json").read_text())
    from jpipe.data import load_tokens, validation_windows

    windows = validation_windows(load_tokens().validation, context=16, microbatch_size=2).windows
    loss = jax.jit(lambda i, t: next_token_loss(nnx.merge(*nnx.split(model))(i), t))
    inputs, targets = (a.reshape(-1, 16) for a in windows)
    assert float(loss(inputs, targets)) == pytest.approx(summary["validation_loss"], rel=1e-5)


def test_learns(tmp_path):
    rows = metrics(train(tmp_path, "--mesh", "2", "--steps", "60", "--learning-rate", "0.01"))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1.5


def test_no_steps(tmp_path):
    folder = train(tmp_path, "--mesh", "2", "--steps", "0")
    assert not (folder / "metrics.jsonl").exists()
    assert (folder / "params.msgpack").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 0
    assert summary["validation_loss"] == pytest.approx(math.log(256), abs=0.05)


def test_dry_run_compiles_and_leaves_the_folder_free(tmp_path, capsys):
    folder = train(tmp_path, "--mesh", "4", "--dry-run")
    out = capsys.readouterr().out
    for part in ("a device", "one device alone", "bubble", "stage 3", "simulated"):
        assert part in out
    assert not (folder / "metrics.jsonl").exists()
    train(tmp_path, "--mesh", "2", "--steps", "1")  # the same folder


def test_token_files(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50, 4000)
    np.save(tmp_path / "tokens.npy", tokens)
    tokens.astype("<u2").tofile(tmp_path / "tokens.bin")
    losses = []
    for kind in ("npy", "bin"):
        data = ["--data", str(tmp_path / f"tokens.{kind}"), "--vocab-size", "50"]
        folder = train(tmp_path, "--mesh", "2", "--steps", "2", *data, name=kind)
        losses.append([row["loss"] for row in metrics(folder)])
        assert set((folder / "sample.txt").read_text().split()) <= set(map(str, range(50)))
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(math.log(50), abs=0.05)


def test_text_file(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    folder = train(tmp_path, "--mesh", "2", "--data", str(tmp_path / "text.txt"))
    assert len(metrics(folder)) == 5


def test_divergence_ends_the_run_and_keeps_what_came_before(tmp_path, capsys):
    folder = tmp_path / "run"
    status = main([*SMALL, "--mesh", "2", "--out", str(folder), "--learning-rate", "1e30"])
    out = capsys.readouterr().out
    assert status == 1
    rows = metrics(folder)
    assert 1 <= len(rows) < 5
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert f"step {len(rows) + 1}" in out
    assert "--learning-rate" in out
    assert not (folder / "params.msgpack").exists()
    assert (folder / "loss.png").exists()


@pytest.mark.parametrize("steps", ["1", "3"])
def test_divergence_seen_by_the_validation(tmp_path, capsys, steps):
    folder = tmp_path / "run"
    arguments = ["--mesh", "2", "--steps", steps, "--eval-every", "1", "--learning-rate", "1e30"]
    assert main([*SMALL, "--out", str(folder), *arguments]) == 1
    assert "step 1: after its update the validation loss is" in capsys.readouterr().out
    assert [row["step"] for row in metrics(folder)] == [1]
    assert not (folder / "params.msgpack").exists()
    assert not (folder / "summary.json").exists()


def test_two_runs_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    folders = [RunFolder(None, "gpt", {}).path for _ in range(3)]
    assert [folder.name for folder in folders] == ["gpt-now", "gpt-now-2", "gpt-now-3"]


def run_command(tmp_path, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "jpipe.train", *SMALL, *arguments],
        cwd=tmp_path,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_interrupt_ends_cleanly(tmp_path):
    process = run_command(tmp_path, "--mesh", "2", "--steps", "100000", "--out", "run")
    metrics_file = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics_file.exists() and metrics_file.read_text().count("\n") > 3):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "Traceback" not in out
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == len(rows)
    assert f"interrupted after step {len(rows)}" in out
    flax.serialization.msgpack_restore((tmp_path / "run" / "params.msgpack").read_bytes())


def test_devices_are_simulated_and_the_users_flags_respected(tmp_path):
    process = run_command(tmp_path, "--mesh", "4", "--steps", "1")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "4 devices simulated on the CPU" in out
    assert len(list((tmp_path / "runs").glob("gpt-*/params.msgpack"))) == 1
    flags = "--xla_force_host_platform_device_count=2"
    process = run_command(tmp_path, "--mesh", "4", XLA_FLAGS=flags)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert flags in out


def test_option_names_are_frozen():
    """Scripts depend on them."""
    assert parse_options([]) == TrainOptions()
    names = (
        "mesh model layers width heads context data vocab_size steps batch_size microbatches "
        "schedule chunks recompute learning_rate seed eval_every out platform dry_run tied "
        "distributed coordinator num_processes process_id precision compression freeze_step "
        "snapshot_every_steps snapshot_every_microbatches keep_snapshots keep_every "
        "snapshot_errors resume max_restarts comm_timeout verify_comm"
    )
    assert sorted(vars(TrainOptions())) == sorted(names.split())
    options = parse_options(["--data", "a", "b", "--vocab-size", "7", "--dry-run"])
    assert options == TrainOptions(data=("a", "b"), vocab_size=7, dry_run=True)


@pytest.mark.slow
def test_the_default_run_beats_the_bigram_model(tmp_path):
    """What the README promises of `python -m jpipe.train --mesh 4`."""
    command = [sys.executable, "-m", "jpipe.train", "--mesh", "4", "--out", "run"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=1500)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 600
    assert summary["validation_loss"] < summary["bigram_validation_loss"]
    assert summary["bytes_per_device"] < summary["bytes_on_one_device"]


@pytest.mark.slow
def test_resnet(tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = ["--model", "resnet18", "--width", "4", "--mesh", "3", "--steps", "3"]
    assert main([*arguments, "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    for part in ("handwritten digits", "balanced by operations", "linear model", "right"):
        assert part in out
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["images_per_s"] > 0 for row in rows)
    plain = flax.serialization.msgpack_restore((folder / "params.msgpack").read_bytes())
    model = ResNet(ResNetConfig(depth=18, width=4), rngs=nnx.Rngs(9))
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, plain)
    nnx.update(model, state)
    model.eval()
    validation = load_images().validation
    terms = classification_loss(model(validation.images[:176]), validation.labels[:176])
    summary = json.loads((folder / "summary.json").read_text())
    assert float(terms.total / terms.weight) == pytest.approx(summary["validation_loss"], rel=1e-4)


@pytest.mark.slow
def test_images_of_ones_own(tmp_path):
    drawn = np.random.default_rng(0)
    labels = drawn.integers(0, 3, 100)
    images = drawn.integers(0, 80, (100, 6, 6, 3)) + 80 * labels[:, None, None, None]
    np.savez(tmp_path / "own.npz", images=images.astype(np.uint8), labels=labels)
    arguments = ["--model", "resnet18", "--width", "4", "--mesh", "2", "--steps", "20"]
    arguments += ["--data", str(tmp_path / "own.npz"), "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    rows = metrics(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"] / 2


def test_tied_embeddings(tmp_path):
    folder = train(tmp_path, "--mesh", "2", "--tied")
    plain = flax.serialization.msgpack_restore((folder / "params.msgpack").read_bytes())
    assert set(plain["head"]) == {"norm"}
