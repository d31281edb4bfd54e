"""The checker names every kind of fault, and where it is."""

import dataclasses

import pytest
from schedule.tables import (
    edited,
    swapped,
)

from jpipe.schedule import (
    Op,
    check_schedule,
    forward_only_schedule,
    gpipe_schedule,
    make_schedule,
    one_f_one_b_schedule,
    zero_bubble_schedule,
)

F, B = int(Op.FORWARD), int(Op.BACKWARD)

# In the table below, F(i) of stage s is in tick 2i + s and B(j) in tick 2j + 7 - s.

BASE = one_f_one_b_schedule(4, 6)
ZERO = zero_bubble_schedule(4, 8)


def with_routes(*routes, schedule=BASE):
    return dataclasses.replace(schedule, routes=routes)


def with_route(t, r, schedule=BASE):
    route = schedule.route.copy()
    route[t] = r
    return dataclasses.replace(schedule, route=route)


def cut(schedule, num_ticks):
    arrays = ("op", "microbatch", "chunk", "route")
    return dataclasses.replace(schedule, **{f: getattr(schedule, f)[:num_ticks] for f in arrays})


EVEN, ODD = BASE.routes
FAULTS = {
    "deleted forward": (
        edited(BASE, ((5, 1), (0, -1, -1))),
        "missing input at stage 2, tick 6, microbatch 2: F(2) on stage 2 expected F(2) on stage 1 "
        "by tick 5; it never runs",
    ),
    "deleted first forward": (
        edited(BASE, ((4, 0), (0, -1, -1))),
        "missing input at stage 1, tick 5, microbatch 2: F(2) on stage 1 expected F(2) on stage 0 "
        "by tick 4; it never runs",
    ),
    "deleted backward": (
        edited(BASE, ((14, 3), (0, -1, -1))),
        "missing input at stage 2, tick 15, microbatch 5: B(5) on stage 2 expected B(5) on stage 3 "
        "by tick 14; it never runs",
    ),
    "deleted last backward": (
        edited(BASE, ((17, 0), (0, -1, -1))),
        "missing operation at stage 0, tick 17, microbatch 5: expected B(5) on stage 0 by tick 17",
    ),
    "skipped microbatch": (
        edited(BASE, ((6, 0), (F, 4, 0))),
        "out of order at stage 0, tick 6, microbatch 4: expected F(3) on stage 0 before F(4)",
    ),
    "repeated microbatch": (
        edited(BASE, ((6, 0), (F, 1, 0))),
        "duplicate at stage 0, tick 6, microbatch 1: expected F(1) on stage 0 once",
    ),
    "wrong microbatch": (
        edited(BASE, ((7, 1), (F, 4, 0))),
        "missing input at stage 1, tick 7, microbatch 4: F(4) on stage 1 expected F(4) on stage 0 "
        "by tick 6; it runs in tick 8",
    ),
    "microbatch too large": (
        edited(BASE, ((6, 0), (F, 6, 0))),
        "microbatch out of range at stage 0, tick 6, microbatch 6: expected a microbatch from 0 "
        "to 5, is 6",
    ),
    "busy without microbatch": (
        edited(BASE, ((6, 0), (F, -1, 0))),
        "microbatch out of range at stage 0, tick 6, microbatch none: expected a microbatch",
    ),
    "chunk too large": (
        edited(BASE, ((6, 0), (F, 3, 1))),
        "chunk out of range at stage 0, tick 6, microbatch 3: expected a chunk from 0 to 0, is 1",
    ),
    "idle with microbatch": (
        edited(BASE, ((1, 0), (0, 2, -1))),
        "idle cell with work at stage 0, tick 1, microbatch 2: an idle cell has microbatch -1",
    ),
    "idle with chunk": (
        edited(BASE, ((1, 0), (0, -1, 0))),
        "idle cell with work at stage 0, tick 1, microbatch none: an idle cell has",
    ),
    "unknown op": (
        edited(BASE, ((6, 0), (7, 3, 0))),
        "unknown op at stage 0, tick 6, microbatch 3: expected one of [0, 1, 2, 3], is 7",
    ),
    "forward instead of backward": (
        edited(BASE, ((9, 0), (F, 1, 0))),
        "duplicate at stage 0, tick 9, microbatch 1: expected F(1) on stage 0 once",
    ),
    "backward too early": (
        edited(BASE, ((2, 0), (B, 1, 0))),
        "missing input at stage 0, tick 2, microbatch 1: B(1) on stage 0 expected B(1) on stage 1 "
        "by tick 1; it runs in tick 8",
    ),
    "backward before forward": (
        swapped(gpipe_schedule(1, 2), (1, 0), (3, 0)),
        "backward before forward at stage 0, tick 1, microbatch 1: expected F(1) on stage 0 before",
    ),
    "backwards out of order": (
        swapped(gpipe_schedule(1, 2), (2, 0), (3, 0)),
        "out of order at stage 0, tick 2, microbatch 1: expected B(0) on stage 0 before B(1)",
    ),
    "missing backward": (
        edited(gpipe_schedule(1, 2), ((3, 0), (0, -1, -1))),
        "missing operation at stage 0, tick 3, microbatch 1: expected B(1) on stage 0 by tick 3",
    ),
    "missing forward": (
        edited(forward_only_schedule(1, 3), ((2, 0), (0, -1, -1))),
        "missing operation at stage 0, tick 2, microbatch 2: expected F(2) on stage 0 by tick 2",
    ),
    "table cut short": (
        cut(BASE, 17),
        "missing operation at stage 0, tick 16, microbatch 5: expected B(5) on stage 0 by tick 16, "
        "the last",
    ),
    "table cut in the middle": (
        cut(make_schedule("1f1b-overlap", 4, 6), 6),
        "missing operation at stage 0, tick 5, microbatch 3: expected F(3) on stage 0 by tick 5, "
        "the last",
    ),
    "table too fast for its hop": (
        dataclasses.replace(BASE, hop=2),
        "missing input at stage 1, tick 1, microbatch 0: F(0) on stage 1 expected F(0) on stage 0 "
        "by tick -1; it runs in tick 0",
    ),
    "weight gradient too early": (
        swapped(ZERO, (4, 3), (11, 3)),
        "weight gradient before backward at stage 3, tick 4, microbatch 0: expected B(0) on stage "
        "3 before W(0) on stage 3",
    ),
    "missing weight gradient": (
        edited(ZERO, ((26, 0), (0, -1, -1))),
        "missing operation at stage 0, tick 26, microbatch 7: expected W(7) on stage 0 by tick 26",
    ),
    "weight gradients out of order": (
        swapped(ZERO, (23, 3), (26, 3)),
        "out of order at stage 3, tick 23, microbatch 7: expected W(4) on stage 3 before W(7)",
    ),
    "missing edge up": (
        with_routes(EVEN[1:], ODD),
        "missing edge at stage 0, tick 0, microbatch 0: expected edge (0, 1) in route 0 for F(0)",
    ),
    "missing edge down": (
        with_routes(tuple(e for e in EVEN if e != (1, 0)), ODD),
        "missing edge at stage 1, tick 6, microbatch 0: expected edge (1, 0) in route 0 for B(0)",
    ),
    "wrong route": (
        with_route(4, 1),
        "missing edge at stage 0, tick 4, microbatch 2: expected edge (0, 1) in route 1 for F(2)",
    ),
    "route out of range": (
        with_route(4, 2),
        "route out of range at stage 0, tick 4, microbatch 2: expected one of the 2 routes, is 2",
    ),
    "duplicate edge": (
        with_routes(((0, 1), (0, 1)), ODD),
        "duplicate edge at stage 0, tick 0, microbatch 0: expected edge (0, 1) of route 0 once",
    ),
    "edge out of range": (
        with_routes(EVEN, (*ODD, (3, 4))),
        "edge out of range at stage 3, tick 1, microbatch none: expected stages from 0 to 3",
    ),
    "edge between strangers": (
        with_routes(EVEN, (*ODD, (0, 2))),
        "edge between strangers at stage 0, tick 1, microbatch none: expected neighbours in edge "
        "(0, 2) of route 1",
    ),
    "edge to itself": (
        with_routes(EVEN, (*ODD, (0, 0))),
        "edge between strangers at stage 0, tick 1, microbatch none: expected neighbours",
    ),
    "ring without chunks": (
        with_routes(EVEN, (*ODD, (3, 0))),
        "edge between strangers at stage 3, tick 1, microbatch none: expected neighbours in edge "
        "(3, 0) of route 1; a ring needs num_chunks above 1",
    ),
    "fault in a spare route": (
        with_routes(EVEN, ODD, ((1, 3),)),
        "edge between strangers at stage 1, of a route that no tick uses, microbatch none",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_each_fault_names_its_kind_and_place(case):
    schedule, message = FAULTS[case]
    with pytest.raises(ValueError, match="schedule '") as refusal:
        check_schedule(schedule)
    assert f"schedule {schedule.name!r}: {message}" in str(refusal.value)


def test_the_first_of_two_faults_is_named():
    late, early = ((9, 1), (0, -1, -1)), ((5, 1), (0, -1, -1))
    for cells in ((late, early), (early, late)):
        with pytest.raises(ValueError, match="stage 2, tick 6, microbatch 2"):
            check_schedule(edited(BASE, *cells))


def test_the_stash_bound_names_the_first_excess():
    check_schedule(BASE, [4, 3, 2, 1])
    message = "kept at stage 0, tick 6, microbatch 3: expected at most 3 kept, would keep 4"
    with pytest.raises(ValueError, match=message):
        check_schedule(BASE, [3, 3, 2, 1])
    with pytest.raises(ValueError, match="stage 3, tick 3, microbatch 0"):
        check_schedule(BASE, [4, 3, 2, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_stages": 0}, "num_stages=0 must be at least 1"),
        ({"num_microbatches": 0}, "num_microbatches=0 must be at least 1"),
        ({"num_chunks": 0}, "num_chunks=0 must be at least 1"),
        ({"hop": 0}, "hop=0 must be 1 or 2"),
        ({"hop": 3}, "hop=3 must be 1 or 2"),
        ({"num_stages": 3}, r"op has shape \(18, 4\)"),
        ({"op": BASE.op[:, :3]}, r"op has shape \(18, 3\).*expected integers of shape \(18, 4\)"),
        ({"microbatch": BASE.microbatch[:-1]}, r"microbatch has shape \(17, 4\)"),
        ({"chunk": BASE.chunk[0]}, r"chunk has shape \(4,\)"),
        ({"route": BASE.route[:-1]}, r"route has shape \(17,\)"),
        ({"microbatch": BASE.microbatch.astype(float)}, "type float64; expected integers"),
        ({"num_microbatches": 5}, "microbatch out of range at stage 0, tick 10, microbatch 5"),
        ({"num_microbatches": 7}, "missing operation at stage 0, tick 17, microbatch 6"),
    ],
)
def test_counts_and_shapes_must_agree(change, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(dataclasses.replace(BASE, **change))


def test_the_stash_bound_needs_one_number_a_stage():
    with pytest.raises(
        ValueError, match=r"max_kept=\[4, 3\] must have one number for each of the 4"
    ):
        check_schedule(BASE, [4, 3])


def test_an_empty_table_misses_everything():
    with pytest.raises(ValueError, match="missing operation at stage 0"):
        check_schedule(cut(BASE, 0))
