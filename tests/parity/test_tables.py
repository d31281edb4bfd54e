"""Tables that no builder makes: every stage does, in each tick, anything it can or nothing."""

import random

import pytest
from parity import models
from parity.cases import assert_same, pipeline_numbers, reference_numbers
from parity.test_chunks import chunked
from schedule.tables import random_table

from jpipe.schedule import check_schedule, make_schedule, schedule_from_cells, schedule_to_cells

# P, V, M, hop, whether the backward is cut in two, and whether every other chunk goes back.
SIZES = [
    (2, 1, 4, 1, False, False),
    (4, 1, 6, 1, True, False),
    (3, 1, 5, 2, True, False),
    (4, 1, 3, 2, False, False),
    (2, 2, 5, 1, True, False),
    (2, 3, 3, 2, False, False),
    (1, 2, 4, 1, True, False),
    (3, 2, 4, 1, False, True),
    (2, 3, 3, 1, True, True),
    (2, 2, 3, 2, True, True),
]


@pytest.mark.parametrize(("P", "V", "M", "hop", "splits", "folded"), SIZES)
def test_any_right_table_computes_the_numbers_of_one_device(P, V, M, hop, splits, folded):
    schedule = random_table(P, V, M, hop, splits, random.Random(P + M), folded)
    check_schedule(schedule)
    problem = models.mlp(P * V, M)
    if V > 1:
        problem = chunked(problem, V)
    assert_same(pipeline_numbers(problem, schedule, P), reference_numbers(problem))


def test_a_table_as_users_write_it():
    problem = models.mlp(4, 6)
    cells = schedule_to_cells(make_schedule("1f1b", 4, 6))
    # Everybody waits for two ticks, where what has arrived must be kept.
    late = [[*row[:3], "", "-", *row[3:]] for row in cells]
    schedule = schedule_from_cells(late)
    assert schedule.num_ticks == len(cells[0]) + 2
    assert_same(pipeline_numbers(problem, schedule, 4), reference_numbers(problem))
