"""Tables of all kinds, and ways to corrupt them."""

import dataclasses

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from jpipe.schedule import (
    SCHEDULES,
    Op,
    Schedule,
    forward_only_schedule,
    make_schedule,
)
from jpipe.schedule.table import from_cells, nth_of_chunk

F, B, W = int(Op.FORWARD), int(Op.BACKWARD), int(Op.WEIGHT)


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


def random_table(P, V, M, hop, splits, random, folded=False):
    """A right table in which every stage does, in each tick, anything it can or nothing."""
    last = V * P - 1
    kinds = (F, B, W) if splits else (F, B)
    done = {op: [0] * (last + 1) for op in kinds}
    tick_of, cells, t = {}, {}, 0

    def ready(op, v):
        i = done[op][v]
        if i == M:
            return False
        needs = [(op, v - 1 if op == F else v + 1)] if op != W and 0 < v + (op == B) <= last else []
        arrived = all(tick_of.get((*need, i), t) + hop <= t for need in needs)
        before = {F: None, B: F, W: B}[op]
        return arrived and (before is None or done[before][v] > i)

    while any(count < M for counts in done.values() for count in counts):
        chosen = {}
        for s in range(P):
            own = [c * P + nth_of_chunk(s, c, P, folded=folded) for c in range(V)]
            can = [(op, v) for op in kinds for v in own if ready(op, v)]
            if can and random.random() < 0.8:
                chosen[s] = random.choice(can)
        for s, (op, v) in chosen.items():
            i = done[op][v]
            cells[t, s], tick_of[op, v, i] = (op, i, v // P), t
            done[op][v] += 1
        t += 1
    return from_cells("random", P, M, cells, hop=hop, num_chunks=V, folded=folded)


chunks = st.integers(1, 3)


# A table has to have neighbours for the tick of an operation to matter.
@st.composite
def tables(draw, least_stages=2):
    kind = draw(st.sampled_from(["built", "sparse", "random"]))
    if kind == "built":
        name = draw(st.sampled_from([*sorted(SCHEDULES), "forward-only"]))
        P, M, V = draw(st.integers(least_stages, 6)), draw(st.integers(1, 8)), draw(chunks)
        if name == "forward-only":
            return forward_only_schedule(P, M, V)
        most = {"interleaved": 3, "zero-bubble-v": 2}
        return make_schedule(name, P, M, min(V, most.get(name, 1)))
    if kind == "random":
        sizes = [draw(st.integers(*pair)) for pair in ((least_stages, 4), (1, 3), (1, 4), (1, 2))]
        splits, folded = draw(st.booleans()), draw(st.booleans())
        return random_table(*sizes, splits, draw(st.randoms(use_true_random=False)), folded)
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
    for t, s in np.argwhere(np.isin(schedule.op, [F, B])).tolist():
        step = 1 if schedule.op[t, s] == Op.FORWARD else -1
        v = int(schedule.virtual_stage[t, s]) + step
        if 0 <= v <= schedule.last:
            yield t, (s, schedule.stage_of(v))


def without_edge(schedule, t, edge):
    """A copy in which the exchange of tick t lacks an edge."""
    route = schedule.route.copy()
    route[t] = len(schedule.routes)
    poorer = tuple(e for e in schedule.routes[schedule.route[t]] if e != edge)
    return dataclasses.replace(schedule, routes=(*schedule.routes, poorer), route=route)


FATAL = ("delete", "microbatch", "op", "chunk", "edge", "fill")
KINDS = (*FATAL, "swap", "shift")  # operations in other ticks may make another right table


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
            values = st.sampled_from([x for x in (-1, 0, 1, 2, 3, 4) if x != op])
            return edited(schedule, (cell, (draw(values), i, c)))
        case "chunk":
            values = st.integers(-1, schedule.num_chunks).filter(lambda x: x != c)
            return edited(schedule, (cell, (op, i, draw(values))))
        case "edge":
            return without_edge(schedule, *draw(st.sampled_from(list(used_edges(schedule)))))
        case "fill":
            assume(idle)
            return edited(schedule, (draw(st.sampled_from(idle)), (op, i, c)))
