"""What the checker accepts computes the right gradients, and any corruption is refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule.miniature import executed_gradients, expected_gradients
from schedule.tables import (
    FATAL,
    KINDS,
    corruptions,
    swapped,
    tables,
    used_edges,
    without_edge,
)

from jpipe.schedule import (
    Op,
    assign_slots,
    check_schedule,
    gpipe_schedule,
    one_f_one_b_schedule,
    zero_bubble_schedule,
)

F, B = int(Op.FORWARD), int(Op.BACKWARD)


@settings(deadline=None, max_examples=120)
@given(schedule=tables(least_stages=1))
def test_right_tables_are_accepted_and_compute_right_gradients(schedule):
    check_schedule(schedule, assign_slots(schedule).per_stage)
    if (schedule.op == B).any():
        num_virtual = schedule.num_chunks * schedule.num_stages
        assert executed_gradients(schedule) == expected_gradients(
            num_virtual, schedule.num_microbatches
        )


@pytest.mark.parametrize("kind", FATAL)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_single_corruption_is_refused(kind, data):
    schedule = data.draw(tables())
    check_schedule(schedule)
    with pytest.raises(ValueError, match=r"stage \d+, tick \d+, microbatch (\d+|none): "):
        check_schedule(data.draw(corruptions(schedule, kind)))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_whatever_is_accepted_computes_right_gradients(data):
    """On one stage some corruptions give another right table, and so may several in a row."""
    schedule = data.draw(tables(least_stages=1))
    assume((schedule.op == B).any())
    for _ in range(data.draw(st.integers(1, 3))):
        kinds = [k for k in KINDS if k != "edge" or any(used_edges(schedule))]
        assume((schedule.op != Op.IDLE).any())
        schedule = data.draw(corruptions(schedule, data.draw(st.sampled_from(kinds))))
        assume(np.isin(schedule.op, list(Op)).all())
    try:
        check_schedule(schedule)
    except ValueError:
        return
    num_virtual = schedule.num_chunks * schedule.num_stages
    if (schedule.op == B).any():
        expected = expected_gradients(num_virtual, schedule.num_microbatches)
        assert executed_gradients(schedule) == expected


def test_the_miniature_executor_notices_a_wrong_input():
    """Without this, the two tests above could not fail."""
    schedule = one_f_one_b_schedule(4, 6)
    expected = expected_gradients(4, 6)
    assert executed_gradients(schedule) == expected
    assert executed_gradients(without_edge(schedule, 5, (1, 2))) != expected
    assert executed_gradients(dataclasses.replace(schedule, hop=2)) != expected
    split = zero_bubble_schedule(2, 2)
    assert executed_gradients(split) == expected_gradients(2, 2)
    weights = [tuple(cell) for cell in np.argwhere(split.op == Op.WEIGHT).tolist() if cell[1] == 0]
    assert executed_gradients(swapped(split, *weights)) != expected_gradients(2, 2)
    one_stage = gpipe_schedule(1, 2)
    assert executed_gradients(swapped(one_stage, (2, 0), (3, 0))) != expected_gradients(1, 2)


def test_another_right_order_on_one_stage_is_accepted():
    """GPipe on one stage with its middle swapped is 1F1B: right, and within the memory of 1F1B."""
    schedule = swapped(gpipe_schedule(1, 2), (1, 0), (2, 0))
    check_schedule(schedule, [1])
    assert executed_gradients(schedule) == expected_gradients(1, 2)
