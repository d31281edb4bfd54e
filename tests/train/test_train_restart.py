"""What the command tells the processes that it starts again."""

import itertools

import pytest

from jpipe.files import write_atomically
from jpipe.train import restart
from jpipe.train.options import parse_options


@pytest.fixture
def commands(monkeypatch):
    """Makes the commands of one start after the other, as the supervisor would."""
    made = []
    monkeypatch.setattr(restart, "supervise", lambda make, **own: made.append((make, own)) or 0)

    def of(*argv):
        restart.run_and_restart(argv, parse_options(argv))
        make, own = made[-1]
        make.done = own["done"]
        return make

    return of


def resumes(command):
    """Where the one process of a start goes on."""
    ((*_, argv),) = (command(),)
    where = "auto"
    for name, value in itertools.pairwise(argv):
        where = value if name == "--resume" else where
    return where


def test_what_is_named_is_where_to_begin_and_not_where_to_go_back_to(commands, tmp_path):
    named = tmp_path / "snapshots" / "step-00000010"
    (tmp_path / "snapshots" / "step-00000020").mkdir(parents=True)
    named.mkdir()
    command = commands("--out", str(tmp_path), "--max-restarts", "2", "--resume", str(named))
    assert resumes(command) == str(named)
    (tmp_path / "snapshots" / "step-00000020").rmdir()  # of another life
    assert resumes(command) == str(named)
    (tmp_path / "snapshots" / "step-00000020").mkdir()
    assert resumes(command) == "auto"


def test_is_done_once_a_summary_of_its_own_is_there(commands, tmp_path):
    command = commands("--out", str(tmp_path), "--max-restarts", "2")
    assert not command.done()
    (tmp_path / "summary.json").touch()
    assert command.done()
    command = commands("--out", str(tmp_path), "--max-restarts", "2", "--steps", "9")
    assert not command.done()  # what is there is of the run before
    write_atomically(tmp_path / "summary.json", b"{}")
    assert command.done()


def test_never_is_for_what_others_left(commands, tmp_path):
    arguments = ("--out", str(tmp_path / "run"), "--max-restarts", "2", "--resume", "never")
    assert resumes(commands(*arguments)) == "auto"
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    assert resumes(commands(*arguments)) == "never"


def test_processes_of_a_group_get_an_address_anew(commands, tmp_path):
    command = commands(
        *("--out", str(tmp_path), "--mesh", "2", "--platform", "cpu", "--num-processes", "2")
    )
    first, second = command(), command()
    assert [argv[-2:] for argv in first] == [["--process-id", "0"], ["--process-id", "1"]]
    assert {argv[argv.index("--coordinator") + 1] for argv in first + second} == {
        first[0][first[0].index("--coordinator") + 1],
        second[0][second[0].index("--coordinator") + 1],
    }
