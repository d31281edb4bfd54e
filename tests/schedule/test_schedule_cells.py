"""Tables as users write them."""

import numpy as np
import pytest
from hypothesis import given, settings
from schedule.tables import tables

from jpipe.schedule import (
    make_schedule,
    read_schedule,
    schedule_from_cells,
    schedule_to_cells,
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
    if schedule.hop == 2:
        return
    again = schedule_from_cells(np.array(schedule_to_cells(schedule)))
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
    ],
)
def test_what_is_wrong_is_named(rows, message):
    with pytest.raises(ValueError, match=message):
        schedule_from_cells(rows)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="it is no text in UTF-8"):
        read_schedule(path)
