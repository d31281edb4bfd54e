"""The checker: it names every kind of fault, and what it accepts computes the right gradients."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jpipe.schedule import (
    SCHEDULES,
    Op,
    Schedule,
    assign_slots,
    check_schedule,
    forward_only_schedule,
    gpipe_schedule,
    make_schedule,
    one_f_one_b_schedule,
)

F, B = int(Op.FORWARD), int(Op.BACKWARD)


# --- An executor in miniature ---------------------------------------------------------------------
# Virtual stage v maps x to w_v x^2 in a finite field, so every wrong input shows, and it folds the
# gradients of w_v so that their order shows too.

FIELD, FOLD = 2**31 - 1, 1_000_003


def weight(v):
    return 3 + 2 * v


def forward(v, x):
    return weight(v) * x * x % FIELD


def backward(v, x, g):
    """The gradient of the input, and the term of the weight."""
    return 2 * weight(v) * x * g % FIELD, x * x * g % FIELD


def fold(total, term):
    return (total * FOLD + term) % FIELD


def expected_gradients(num_virtual, num_microbatches):
    totals = [1] * num_virtual
    for i in range(num_microbatches):
        xs = [i + 5]
        for v in range(num_virtual):
            xs.append(forward(v, xs[-1]))
        g = xs[-1]
        for v in reversed(range(num_virtual)):
            g, term = backward(v, xs[v], g)
            totals[v] = fold(totals[v], term)
    return totals


def executed_gradients(schedule):
    """What an executor computes that knows nothing but the table."""
    P, last = schedule.num_stages, schedule.num_chunks * schedule.num_stages - 1
    slots = assign_slots(schedule)
    stash = [[0] * n for n in slots.per_stage]
    top = [{} for _ in range(P)]
    totals = [1] * (last + 1)
    outbox, on_the_way = [0] * P, [[0] * P for _ in range(schedule.hop)]
    for t in range(schedule.num_ticks):
        inbox = on_the_way.pop(0)
        for s in range(P):
            op, i, c = schedule.op[t, s], int(schedule.microbatch[t, s]), schedule.chunk[t, s]
            v, slot = int(c) * P + s, slots.slot[t, s]
            if op == F:
                x = i + 5 if v == 0 else inbox[s]
                stash[s][slot] = x
                outbox[s] = forward(v, x)
                if v == last:
                    top[s][i] = outbox[s]
            elif op == B:
                g = top[s][i] if v == last else inbox[s]
                outbox[s], term = backward(v, stash[s][slot], g)
                totals[v] = fold(totals[v], term)
        arrives = [0] * P
        for a, b in schedule.routes[schedule.route[t]]:
            arrives[b] = outbox[a]
        on_the_way.append(arrives)
    return totals


# --- Tables of all kinds --------------------------------------------------------------------------


def sparse_table(P, V, hop, gaps):
    """A right table that packs each microbatch as early as it fits, `gaps` ticks late."""
    last = V * P - 1
    cells, edges = {}, {}

    def place(op, i, first):
        def tick(v):
            return first + hop * (v if op == F else last - v)

        new_cells = {(tick(v), v % P): (op, i, v // P) for v in range(last + 1)}
        links = [(v, v + 1) if op == F else (v + 1, v) for v in range(last)]
        new_edges = [(tick(a), a % P, b % P) for a, b in links]
        targets = {(t, b) for t in edges for _, b in edges[t]}
        if len(new_cells) <= last or new_cells.keys() & cells.keys():
            return False
        if {(t, b) for t, _, b in new_edges} & targets:
            return False
        cells.update(new_cells)
        for t, a, b in new_edges:
            edges.setdefault(t, []).append((a, b))
        return True

    def earliest(op, i, first):
        while not place(op, i, first):
            first += 1
        return first

    next_f = next_b = 0
    for i, (gap_f, gap_b) in enumerate(gaps):
        f = earliest(F, i, next_f + gap_f)
        next_f = f + 1
        next_b = earliest(B, i, max(next_b, f + hop * last + 1) + gap_b) + 1
    T = 1 + max(t for t, _ in cells)
    op, microbatch, chunk = np.zeros((T, P), int), np.full((T, P), -1), np.full((T, P), -1)
    for cell, content in cells.items():
        op[cell], microbatch[cell], chunk[cell] = content
    by_tick = [tuple(sorted(edges.get(t, []))) for t in range(T)]
    routes = sorted(set(by_tick))
    return Schedule(
        name="sparse",
        num_stages=P,
        num_microbatches=len(gaps),
        op=op.astype(np.int8),
        microbatch=microbatch.astype(np.int32),
        chunk=chunk.astype(np.int32),
        hop=hop,
        routes=tuple(routes),
        route=np.array([routes.index(r) for r in by_tick], np.int32),
        num_chunks=V,
    )


# A table has to have neighbours for the tick of an operation to matter.
@st.composite
def tables(draw, least_stages=2):
    if draw(st.booleans()):
        name = draw(st.sampled_from([*sorted(SCHEDULES), "forward-only"]))
        P, M = draw(st.integers(least_stages, 6)), draw(st.integers(1, 8))
        return forward_only_schedule(P, M) if name == "forward-only" else make_schedule(name, P, M)
    P, V, hop = draw(st.integers(least_stages, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    gap = st.integers(0, 3)
    return sparse_table(P, V, hop, draw(st.lists(st.tuples(gap, gap), min_size=1, max_size=5)))


def edited(schedule, *cells):
    """A copy in which each `(tick, stage)` has a new `(op, microbatch, chunk)`."""
    arrays = {f: getattr(schedule, f).copy() for f in ("op", "microbatch", "chunk")}
    for cell, content in cells:
        for array, value in zip(arrays.values(), content, strict=True):
            array[cell] = value
    return dataclasses.replace(schedule, **arrays)


def content(schedule, cell):
    return tuple(int(a[cell]) for a in (schedule.op, schedule.microbatch, schedule.chunk))


def swapped(schedule, a, b):
    return edited(schedule, (a, content(schedule, b)), (b, content(schedule, a)))


def used_edges(schedule):
    """(tick, edge) of all that carries something to its user."""
    last = schedule.num_chunks * schedule.num_stages - 1
    for t, s in np.argwhere(schedule.op != Op.IDLE).tolist():
        step = 1 if schedule.op[t, s] == Op.FORWARD else -1
        v = int(schedule.chunk[t, s]) * schedule.num_stages + s + step
        if 0 <= v <= last:
            yield t, (s, v % schedule.num_stages)


def without_edge(schedule, t, edge):
    """A copy in which the exchange of tick t lacks an edge."""
    route = schedule.route.copy()
    route[t] = len(schedule.routes)
    poorer = tuple(e for e in schedule.routes[schedule.route[t]] if e != edge)
    return dataclasses.replace(schedule, routes=(*schedule.routes, poorer), route=route)


KINDS = ("swap", "shift", "delete", "microbatch", "op", "chunk", "edge", "fill")


@st.composite
def corruptions(draw, schedule, kind):
    """A copy of a right table with one thing wrong."""
    busy = [tuple(c) for c in np.argwhere(schedule.op != Op.IDLE).tolist()]
    idle = [tuple(c) for c in np.argwhere(schedule.op == Op.IDLE).tolist()]
    cell = draw(st.sampled_from(busy))
    op, i, c = content(schedule, cell)
    match kind:
        case "swap":
            other = draw(st.sampled_from(busy))
            assume(content(schedule, other) != (op, i, c))
            return swapped(schedule, cell, other)
        case "shift":
            other = (cell[0] + draw(st.sampled_from([-1, 1])), cell[1])
            assume(0 <= other[0] < schedule.num_ticks)
            return swapped(schedule, cell, other)
        case "delete":
            return edited(schedule, (cell, (0, -1, -1)))
        case "microbatch":
            values = st.integers(-2, schedule.num_microbatches + 1)
            return edited(schedule, (cell, (op, draw(values.filter(lambda x: x != i)), c)))
        case "op":
            values = st.sampled_from([x for x in (-1, 0, 1, 2, 3) if x != op])
            return edited(schedule, (cell, (draw(values), i, c)))
        case "chunk":
            values = st.integers(-1, schedule.num_chunks).filter(lambda x: x != c)
            return edited(schedule, (cell, (op, i, draw(values))))
        case "edge":
            return without_edge(schedule, *draw(st.sampled_from(list(used_edges(schedule)))))
        case "fill":
            assume(idle)
            return edited(schedule, (draw(st.sampled_from(idle)), (op, i, c)))


# --- What is right is accepted, and what is accepted is right -------------------------------------


@settings(deadline=None, max_examples=120)
@given(schedule=tables(least_stages=1))
def test_right_tables_are_accepted_and_compute_right_gradients(schedule):
    check_schedule(schedule, assign_slots(schedule).per_stage)
    if (schedule.op == B).any():
        num_virtual = schedule.num_chunks * schedule.num_stages
        assert executed_gradients(schedule) == expected_gradients(
            num_virtual, schedule.num_microbatches
        )


@pytest.mark.parametrize("kind", KINDS)
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
    one_stage = gpipe_schedule(1, 2)
    assert executed_gradients(swapped(one_stage, (2, 0), (3, 0))) != expected_gradients(1, 2)


def test_another_right_order_on_one_stage_is_accepted():
    """GPipe on one stage with its middle swapped is 1F1B: right, and within the memory of 1F1B."""
    schedule = swapped(gpipe_schedule(1, 2), (1, 0), (2, 0))
    check_schedule(schedule, [1])
    assert executed_gradients(schedule) == expected_gradients(1, 2)


# --- Every fault has its message ------------------------------------------------------------------
# In the table below, F(i) of stage s is in tick 2i + s and B(j) in tick 2j + 7 - s.

BASE = one_f_one_b_schedule(4, 6)


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
        "lost input at stage 1, tick 5, microbatch 2: expected F(2) on stage 1",
    ),
    "deleted first forward": (
        edited(BASE, ((4, 0), (0, -1, -1))),
        "missing input at stage 1, tick 5, microbatch 2: F(2) on stage 1 expected F(2) on stage 0 "
        "in tick 4; it never runs",
    ),
    "deleted backward": (
        edited(BASE, ((14, 3), (0, -1, -1))),
        "missing input at stage 2, tick 15, microbatch 5: B(5) on stage 2 expected B(5) on stage 3 "
        "in tick 14; it never runs",
    ),
    "deleted last backward": (
        edited(BASE, ((17, 0), (0, -1, -1))),
        "lost input at stage 0, tick 17, microbatch 5: expected B(5) on stage 0",
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
        "lost input at stage 1, tick 7, microbatch 3: expected F(3) on stage 1, whose input "
        "arrives now; it runs F(4) on stage 1",
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
        "unknown op at stage 0, tick 6, microbatch 3: expected one of [0, 1, 2], is 7",
    ),
    "forward instead of backward": (
        edited(BASE, ((9, 0), (F, 1, 0))),
        "duplicate at stage 0, tick 9, microbatch 1: expected F(1) on stage 0 once",
    ),
    "backward too early": (
        edited(BASE, ((2, 0), (B, 1, 0))),
        "missing input at stage 0, tick 2, microbatch 1: B(1) on stage 0 expected B(1) on stage 1 "
        "in tick 1; it runs in tick 8",
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
        "lost input at stage 0, tick 17, microbatch 5: expected B(5) on stage 0; the table ends "
        "with tick 16",
    ),
    "table cut in the middle": (
        cut(make_schedule("1f1b-overlap", 4, 6), 6),
        "lost input at stage 1, tick 6, microbatch 2: expected F(2) on stage 1; the table ends "
        "with tick 5",
    ),
    "table too slow for its hop": (
        dataclasses.replace(make_schedule("1f1b-overlap", 4, 6), hop=1),
        "lost input at stage 1, tick 1, microbatch 0: expected F(0) on stage 1",
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
    "duplicate source": (
        with_routes(((0, 1), (0, 1)), ODD),
        "duplicate source at stage 0, tick 0, microbatch 0: expected one edge from stage 0",
    ),
    "duplicate destination": (
        with_routes(EVEN, ((0, 1), (2, 1))),
        "duplicate destination at stage 2, tick 1, microbatch none: expected one edge to stage 1",
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
        with pytest.raises(ValueError, match="stage 1, tick 5, microbatch 2"):
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
