"""The command: what it prints, what it saves, and what it says to bad input."""

import subprocess
import sys

import pytest

from jpipe.schedule import SCHEDULES
from jpipe.schedule.__main__ import main

SIZE = ["--stages", "4", "--microbatches", "8"]


def rows(output):
    """`{label: cells}` of the printed table."""
    lines = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    return {label.strip(): [c.strip() for c in cells] for label, *cells in lines}


def test_one_schedule(capsys):
    assert main(SIZE) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "stage 0 F0 ·  F1 ·  F2 ·  F3 B0 F4 B1" in output.out
    assert rows(output.out) == {
        "ticks": ["22"],
        "makespan, in forwards": ["33"],
        "bubble": ["27.3%"],
        "idle by stage, in forwards": ["9 9 9 9"],
        "kept at most, by stage": ["4 3 2 1"],
    }


def test_all_schedules_side_by_side(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "180")
    assert main([*SIZE, "--schedule", "all"]) == 0
    output = capsys.readouterr().out
    assert all(f" {name} " in output for name in SCHEDULES)
    found = rows(output)
    assert found["ticks"] == ["22", "22", "28", "52", "27", "42", "51"]
    assert found["bubble"] == ["27.3%", "27.3%", "27.3%", "15.8%", "11.1%", "11.1%", "5.9%"]
    assert found["kept at most, by stage"] == [
        "8 8 8 8",
        "4 3 2 1",
        "7 5 3 1",
        "11 9 7 5 chunks",
        "4 4 4 4",
        "7 6 5 4",
        "8 8 8 8 chunks",
    ]
    assert "F0" not in output


def test_costs_count_and_times_are_in_forwards(capsys):
    costs = ["--forward-cost", "0.5", "--backward-cost", "0.5", "--link-cost", "0"]
    assert main([*SIZE, *costs]) == 0
    assert rows(capsys.readouterr().out)["makespan, in forwards"] == ["22"]
    assert main([*SIZE, "--schedule", "1f1b-overlap", "--link-cost", "1"]) == 0
    assert rows(capsys.readouterr().out)["makespan, in forwards"] == ["39"]


def test_a_table_goes_out_and_comes_back(capsys, tmp_path):
    path = str(tmp_path / "table.csv")
    assert main([*SIZE, "--schedule", "interleaved", "--out", path]) == 0
    first = capsys.readouterr().out
    assert main([*SIZE, "--schedule", path]) == 0
    again = capsys.readouterr().out
    kept = "kept at most, by stage"
    assert rows(first)[kept] == rows(again)[kept] == ["11 9 7 5 chunks"]
    assert main(["--stages", "3", "--microbatches", "8", "--schedule", path]) == 2
    assert "is for 4 stages, not 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_out_saves_a_figure(capsys, tmp_path, name):
    path = tmp_path / name
    assert main([*SIZE, "--out", str(path)]) == 0
    assert path.stat().st_size > 1000
    assert capsys.readouterr().out.endswith(f"saved {path}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --stages, --microbatches"),
        (["--stages", "0", "--microbatches", "8"], "argument --stages: '0' must be a whole number"),
        (["--stages", "4", "--microbatches", "x"], "--microbatches: 'x' must be a whole number"),
        (["--stages", "1.5", "--microbatches", "8"], "argument --stages: '1.5' must be a whole"),
        ([*SIZE, "--schedule", "pipedream"], "argument --schedule: 'pipedream' is unknown; choose"),
        ([*SIZE, "--schedule", "no.csv"], "cannot read the schedule 'no.csv': No such file"),
        ([*SIZE, "--chunks", "2"], "schedule='1f1b' runs one chunk of the model on a stage"),
        ([*SIZE, "--schedule", "all", "--chunks", "2"], "argument --chunks: 2 needs --schedule"),
        ([*SIZE, "--forward-cost", "0"], "argument --forward-cost: '0' must be a finite number"),
        ([*SIZE, "--backward-cost", "nan"], "argument --backward-cost: 'nan' must be a finite"),
        ([*SIZE, "--link-cost", "-1"], "argument --link-cost: '-1' must be a finite number of at"),
        ([*SIZE, "--link-cost", "x"], "argument --link-cost: 'x' must be a finite number of at"),
        ([*SIZE, "--out", "a.pdf"], "argument --out: path='a.pdf' must end in .png or .svg"),
        ([*SIZE, "--out", "no/such/a.png"], "argument --out: cannot write 'no/such/a.png'"),
        ([*SIZE, "--schedule", "all", "--out", "a.png"], "argument --out: 'a.png' needs one"),
        ([*SIZE, "--stage", "3"], "unrecognized arguments: --stage 3"),
    ],
)
def test_bad_input_gets_one_message_and_status_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert message in output.err
    assert not list(tmp_path.iterdir())


def test_help_lists_every_schedule(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    output = capsys.readouterr().out
    assert all(name in output for name in SCHEDULES)


def test_as_a_module():
    command = [sys.executable, "-m", "jpipe.schedule"]
    good = subprocess.run([*command, *SIZE], capture_output=True, encoding="utf-8")
    assert (good.returncode, good.stderr) == (0, "")
    assert "27.3%" in good.stdout
    bad = subprocess.run([*command, "--stages", "0"], capture_output=True, encoding="utf-8")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "Traceback" not in bad.stderr
