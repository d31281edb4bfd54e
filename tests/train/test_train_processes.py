"""Real processes that train together over a loopback network."""

import json
import os
import socket
import subprocess
import sys

import pytest

SMALL = """
--layers 4 --width 16 --heads 2 --context 16 --batch-size 8 --microbatches 2 --steps 4
--eval-every 2 --platform cpu
""".split()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_together(folder, num_processes, *arguments):
    """Run the command in so many processes; return what each printed."""
    coordinator = f"127.0.0.1:{free_port()}"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                *("-m", "jpipe.train", *SMALL, *arguments, "--out", str(folder)),
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
    for process, out in zip(processes, outputs, strict=True):
        assert process.returncode == 0, out
    return outputs


def test_two_axes_over_cpu_processes_are_refused(tmp_path):
    """They could wait for each other for ever."""
    command = [sys.executable, "-m", "jpipe.train", *SMALL, "--mesh", "2x2", "--out", "run"]
    coordinator = f"127.0.0.1:{free_port()}"
    command += ["--coordinator", coordinator, "--num-processes", "2", "--process-id"]
    processes = [
        subprocess.Popen([*command, str(k)], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for k in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
    assert all("one axis" in error for error in errors)


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
