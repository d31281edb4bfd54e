"""Tables as users write them."""

import numpy as np
import pytest
from hypothesis import given, settings
from schedule.tables import tables

from jpipe.schedule import (
    CostModel,
    make_schedule,
    read_schedule,
    schedule_from_cells,
    schedule_to_cells,
    simulate_schedule,
    write_schedule,
)

ARRAYS = ("op", "microbatch", "chunk")


def test_by_hand():
    schedule = schedule_from_cells(
        [["F0", "F1", "", "B0", "-", "B1"], ["", "F0", "B0", "F1", "B1"]]
    )
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks) == (2, 2, 1)
    assert schedule.routes[schedule.route[1]] == ((0, 1),)
    assert schedule.routes[schedule.route[2]] == ((1, 0),)
    assert schedule_to_cells(schedule)[1] == ["", "F0", "B0", "F1", "B1", ""]


@settings(deadline=None, max_examples=60)
@given(schedule=tables(least_stages=1))
def test_any_table_comes_back(schedule):
    cells = np.array(schedule_to_cells(schedule))
    again = schedule_from_cells(cells, hop=schedule.hop, folded=schedule.folded)
    for field in ARRAYS:
        busy = np.flatnonzero(schedule.op.any(axis=1)).max() + 1
        np.testing.assert_array_equal(getattr(again, field), getattr(schedule, field)[:busy])


def test_a_file_comes_back(tmp_path):
    schedule = make_schedule("zero-bubble", 4, 6)
    write_schedule(schedule, tmp_path / "table.csv")
    again = read_schedule(tmp_path / "table.csv")
    assert again.name == "table.csv"
    for field in ARRAYS:
        np.testing.assert_array_equal(getattr(again, field), getattr(schedule, field))


def test_a_file_says_that_chunks_go_back(tmp_path):
    schedule = make_schedule("zero-bubble-v", 3, 4, 2)
    write_schedule(schedule, tmp_path / "table.csv")
    path = tmp_path / "table.csv"
    assert path.read_text().startswith("folded\n")
    again = read_schedule(path)
    assert again.folded
    np.testing.assert_array_equal(again.virtual_stage, schedule.virtual_stage)
    text = path.read_text().removeprefix("folded\n")
    path.write_text(text)
    with pytest.raises(ValueError, match="missing input"):
        read_schedule(path)


@pytest.mark.parametrize("name", ["1f1b-overlap", "interleaved", "zero-bubble-overlap"])
def test_a_file_keeps_the_hop_and_what_it_hides(tmp_path, name):
    schedule = make_schedule(name, 4, 8, 2 if name == "interleaved" else 1)
    write_schedule(schedule, tmp_path / "table.csv")
    again = read_schedule(tmp_path / "table.csv")
    assert again.hop == 2
    assert again.period == schedule.period
    costs = CostModel(link=0.3)
    assert simulate_schedule(again, costs).makespan == simulate_schedule(schedule, costs).makespan


def test_blank_lines_and_padding_of_spreadsheets_do_not_count(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("\ufeffF0, B0 ,,\n , ,\n\n", encoding="utf-8")
    assert read_schedule(path).num_stages == 1


@pytest.mark.parametrize("text", ["hop,3\nF0,B0\n", "hop\nF0,B0\n"])
def test_another_hop_is_refused(tmp_path, text):
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(ValueError, match="must be hop,1 or hop,2"):
        read_schedule(tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["F0", "G0"]], "'G0' at stage 0, tick 1 is no operation; write F, B or W"),
        ([["F0", "B"]], "'B' at stage 0, tick 1 is no operation"),
        ([["F-1", "B0"]], "'F-1' at stage 0, tick 0 is no operation"),
        ([[""], [""]], "holds no operation"),
        ([], "holds no operation"),
        ([["F0", "B0", "F0"]], "duplicate at stage 0, tick 2, microbatch 0"),
        ([["F0", "", "B0"], ["F0", "B0"]], "missing input at stage 1, tick 0, microbatch 0"),
        ([["F0", "B0", "F2", "B2"]], "out of order at stage 0, tick 2, microbatch 2"),
        ([["F0", "B0"], ["", ""]], "missing input at stage 0, tick 1"),
        ([["F0", "B0", "F0.200000"]], "names microbatch 0 and chunk 200000, but has 3 operations"),
        ([["F4294967296"]], "'F4294967296' at stage 0, tick 0 is no operation"),
    ],
)
def test_what_is_wrong_is_named(rows, message):
    with pytest.raises(ValueError, match=message):
        schedule_from_cells(rows)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "table.csv"
    for content in (b"\xff\xfe\x00", b"F0," + b"x" * 200_000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="it is no table in UTF-8"):
            read_schedule(path)
