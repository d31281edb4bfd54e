"""Real processes that train together over a loopback network."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from train.test_train_resume import as_if_killed_after

SMALL = """
--layers 4 --width 16 --heads 2 --context 16 --batch-size 8 --microbatches 2 --steps 4
--eval-every 2 --platform cpu
""".split()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_together(folder, num_processes, *arguments, module=("jpipe.train",), status=0):
    """Run the command in so many processes, which end with a status; what each printed."""
    coordinator = f"127.0.0.1:{free_port()}"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                *("-m", *module, *SMALL, *arguments, "--out", str(folder)),
                *("--coordinator", coordinator, "--num-processes", str(num_processes)),
                *("--process-id", str(k)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(num_processes)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, out in zip(processes, outputs, strict=True):
        assert process.returncode == status, out
    return outputs


def test_two_axes_over_cpu_processes_are_refused(tmp_path):
    """They could wait for each other for ever."""
    outputs = run_together(tmp_path / "run", 2, "--mesh", "2x2", status=2)
    assert all("one axis" in out for out in outputs)


def test_what_one_process_refuses_all_refuse(tmp_path):
    """Only the first looks into the run folder; nobody waits for it for ever."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    outputs = run_together(tmp_path, 2, "--mesh", "2", "--resume", "never", status=2)
    assert all(f"--out {tmp_path} already holds a run" in out for out in outputs)


def numbers(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["tokens_per_s"]
    return [*rows, {"final": json.loads((folder / "summary.json").read_text())["validation_loss"]}]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process, on one device."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    command = [sys.executable, "-m", "jpipe.train", *SMALL, "--mesh", "1", "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return numbers(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "mesh"),
    [
        (2, "4"),
        pytest.param(2, "1x2", marks=pytest.mark.slow),
        pytest.param(4, "4", marks=pytest.mark.slow),
    ],
)
def test_same_numbers_as_one_process(num_processes, mesh, alone, tmp_path):
    folder = tmp_path / "run"
    outputs = run_together(folder, num_processes, "--mesh", mesh)
    for row, expected in zip(numbers(folder), alone, strict=True):
        assert row.keys() == expected.keys()
        for name in row:
            assert row[name] == pytest.approx(expected[name], rel=2e-6), name
    assert f"in {num_processes} processes" in outputs[0]
    # The others neither write nor speak, but for what JAX says of the network.
    assert all("validation" not in out for out in outputs[1:])
    assert {p.name for p in folder.iterdir()} >= {"params.msgpack", "sample.txt", "loss.png"}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_goes_on_in_another_number_of_processes(before, after, alone, tmp_path):
    arguments = ("--mesh", "4", "--snapshot-every-steps", "1", "--keep-snapshots", "9")
    run_together(tmp_path / "whole", before, *arguments)
    folder = as_if_killed_after(tmp_path / "whole", tmp_path, 2)
    out, *_ = run_together(folder, after, *arguments)
    assert "going on after step 2" in out
    for row, expected in zip(numbers(folder), alone, strict=True):
        for name in row:
            assert row[name] == pytest.approx(expected[name], rel=2e-6), name


@pytest.mark.slow
def test_processes_may_be_apart_at_the_start(alone, tmp_path):
    """One reads, or compiles, what another has read or finds compiled; gloo waits for 30 s."""
    late = ("train.apart", "40", "--")
    run_together(tmp_path / "run", 2, "--mesh", "2", module=late)
    assert numbers(tmp_path / "run")[-1] == pytest.approx(alone[-1], rel=2e-6)
