"""Proof that a table computes the right gradients.

The executor trusts its table: it computes on whatever lies in a stage's inbox. What a stage makes
in tick `t` leaves along the route of tick `t` and lies in the inbox of its neighbour from tick
`t + hop` on. So a table is right if every input arrives before it is used, and everything runs once
and in order.
"""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from jpipe.schedule.table import Op, Schedule


def check_schedule(schedule: Schedule, max_kept: Sequence[int] | None = None) -> None:
    """Prove a table right, or name its first fault in the order of ticks.

    Each stage must run the forward and the backward of every microbatch once, backwards after
    their forwards, both in the order of the microbatches: sums of gradients and losses follow that
    order, and results must not depend on the schedule. If there are weight gradients, all must be
    there, after their backwards and in the same order. A table without any backward is a
    forward-only table and as good.

    Args:
        schedule: the table.
        max_kept: for each stage the most microbatches that it may keep at a time; None for any.

    Raises:
        ValueError: if the table has a fault. The message names its kind, stage, tick and
            microbatch, and what was expected.
    """
    _check_header(schedule)
    if max_kept is not None and len(max_kept) != schedule.num_stages:
        raise ValueError(
            f"max_kept={list(max_kept)} must have one number for each of the "
            f"{schedule.num_stages} stages"
        )
    walk = _Walk(schedule, max_kept)
    for t in range(schedule.num_ticks):
        for s in range(schedule.num_stages):
            walk.run_cell(t, s)
        walk.exchange(t)
    walk.finish()


def _check_header(schedule: Schedule) -> None:
    """Check all that has no tick: the counts, the hop, and the shapes and types of the arrays."""
    for field in ("num_stages", "num_microbatches", "num_chunks"):
        if getattr(schedule, field) < 1:
            raise ValueError(
                f"schedule {schedule.name!r}: {field}={getattr(schedule, field)} must be at least 1"
            )
    if schedule.hop not in (1, 2):
        raise ValueError(f"schedule {schedule.name!r}: hop={schedule.hop} must be 1 or 2")
    num_ticks = len(schedule.op)
    table = (num_ticks, schedule.num_stages)
    shapes = {"op": table, "microbatch": table, "chunk": table, "route": (num_ticks,)}
    for field, shape in shapes.items():
        array = getattr(schedule, field)
        if array.shape != shape or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"schedule {schedule.name!r}: {field} has shape {array.shape} and type "
                f"{array.dtype}; expected integers of shape {shape}"
            )


class _Walk:
    """One pass over a table, tick by tick, that remembers what an executor would."""

    def __init__(self, schedule: Schedule, max_kept: Sequence[int] | None) -> None:
        self.schedule = schedule
        self.max_kept = max_kept
        self.kinds = [Op.FORWARD]
        self.kinds += [Op.BACKWARD] if schedule.trains or schedule.splits_backward else []
        self.kinds += [Op.WEIGHT] if schedule.splits_backward else []
        # As microbatches run in order, a count says which have run.
        self.count = {op: [0] * (schedule.last + 1) for op in Op}
        self.kept = [0] * schedule.num_stages
        # (op, microbatch, virtual stage) -> the tick from which its input is there.
        self.arrival: dict[tuple[Op, int, int], int] = {}
        self.proved: set[int] = set()

    def run_cell(self, t: int, s: int) -> None:
        """Check what stage s does in tick t against all that ran before."""
        code, i, c = (
            int(a[t, s]) for a in (self.schedule.op, self.schedule.microbatch, self.schedule.chunk)
        )
        if code not in list(Op):
            self._fail("unknown op", s, t, i, f"expected one of {[int(o) for o in Op]}, is {code}")
        op = Op(code)
        if op == Op.IDLE:
            if (i, c) != (-1, -1):
                expected = f"an idle cell has microbatch -1 and chunk -1, not {i} and {c}"
                self._fail("idle cell with work", s, t, i, expected)
            return
        for field, value, bound in (
            ("microbatch", i, self.schedule.num_microbatches),
            ("chunk", c, self.schedule.num_chunks),
        ):
            if not 0 <= value < bound:
                expected = f"expected a {field} from 0 to {bound - 1}, is {value}"
                self._fail(f"{field} out of range", s, t, i, expected)
        self._check_operation(op, t, s, i, int(self.schedule.virtual_stage[t, s]))

    def _check_operation(self, op: Op, t: int, s: int, i: int, v: int) -> None:
        """Check one operation: not run before, fed, in order, and within the memory."""
        this = self._show(op, i, v)
        if i < self.count[op][v]:
            self._fail("duplicate", s, t, i, f"expected {this} once; it ran before")
        source = self.schedule.source_of(op, v)
        if source is not None and self.arrival.get((op, i, v), t + 1) > t:
            expected = (
                f"{this} expected {self._show(op, i, source)} by tick {t - self.schedule.hop}; "
                f"{self._when(op, i, source)}"
            )
            self._fail("missing input", s, t, i, expected)
        for first, then, kind in (
            (Op.FORWARD, Op.BACKWARD, "backward before forward"),
            (Op.BACKWARD, Op.WEIGHT, "weight gradient before backward"),
        ):
            if op == then and i >= self.count[first][v]:
                self._fail(kind, s, t, i, f"expected {self._show(first, i, v)} before {this}")
        if i > self.count[op][v]:
            expected = f"expected {self._show(op, self.count[op][v], v)} before {this}"
            self._fail("out of order", s, t, i, expected)
        self.count[op][v] += 1
        if op != Op.FORWARD:
            self.kept[s] -= op == self.kinds[-1]
            return
        self.kept[s] = self.kept[s] + 1 if self.schedule.trains else 1
        if self.max_kept is not None and self.kept[s] > self.max_kept[s]:
            expected = f"expected at most {self.max_kept[s]} kept, would keep {self.kept[s]}"
            self._fail("too many microbatches kept", s, t, i, expected)

    def exchange(self, t: int) -> None:
        """Send what tick t made to those who need it."""
        r = int(self.schedule.route[t])
        if not 0 <= r < len(self.schedule.routes):
            busy = np.flatnonzero(self.schedule.op[t])
            s = int(busy[0]) if busy.size else 0
            expected = f"expected one of the {len(self.schedule.routes)} routes, is {r}"
            self._fail("route out of range", s, t, int(self.schedule.microbatch[t, s]), expected)
        self._prove_route(r, t)
        for s in np.flatnonzero(self.schedule.op[t]).tolist():
            op, i = Op(int(self.schedule.op[t, s])), int(self.schedule.microbatch[t, s])
            user = self.schedule.user_of(op, int(self.schedule.virtual_stage[t, s]))
            if user is None:
                continue
            edge = (s, self.schedule.stage_of(user))
            if edge not in self.schedule.routes[r]:
                expected = f"expected edge {edge} in route {r} for {self._show(op, i, user)}"
                self._fail("missing edge", s, t, i, expected)
            self.arrival[op, i, user] = t + self.schedule.hop

    def _prove_route(self, r: int, t: int | None) -> None:
        """Check that a route joins neighbours, and can be cut into lanes."""
        if r in self.proved:
            return
        num_stages, route = self.schedule.num_stages, self.schedule.routes[r]
        ring = self.schedule.num_chunks > 1 and not self.schedule.folded
        more = {(0, num_stages - 1), (num_stages - 1, 0)} if ring else set()
        if self.schedule.folded:
            more = {(0, 0), (num_stages - 1, num_stages - 1)}
        for a, b in route:
            inside = 0 <= a < num_stages and 0 <= b < num_stages
            i = int(self.schedule.microbatch[t, a]) if inside and t is not None else -1
            edge = f"edge {(a, b)} of route {r}"
            if not inside:
                expected = f"expected stages from 0 to {num_stages - 1} in {edge}"
                self._fail("edge out of range", a, t, i, expected)
            if abs(a - b) != 1 and (a, b) not in more:
                needs = "" if more else "; a ring needs num_chunks above 1"
                expected = f"expected neighbours in {edge}{needs}"
                self._fail("edge between strangers", a, t, i, expected)
            if route.count((a, b)) > 1:
                self._fail("duplicate edge", a, t, i, f"expected {edge} once")
        self.proved.add(r)

    def finish(self) -> None:
        """Check that nothing is left over when the table ends."""
        end = self.schedule.num_ticks
        for op in self.kinds:
            for v, i in enumerate(self.count[op]):
                if i < self.schedule.num_microbatches:
                    expected = f"expected {self._show(op, i, v)} by tick {end - 1}, the last"
                    s = self.schedule.stage_of(v)
                    self._fail("missing operation", s, end - 1, i, expected)
        for r in range(len(self.schedule.routes)):
            self._prove_route(r, None)

    def _show(self, op: Op, i: int, v: int) -> str:
        c, s = v // self.schedule.num_stages, self.schedule.stage_of(v)
        chunk = f" chunk {c}" if self.schedule.num_chunks > 1 else ""
        return f"{op.letter}({i}) on stage {s}{chunk}"

    def _when(self, op: Op, i: int, v: int) -> str:
        """Say in which ticks an operation runs, for a message."""
        c, s = v // self.schedule.num_stages, self.schedule.stage_of(v)
        runs = (self.schedule.op[:, s] == op) & (self.schedule.microbatch[:, s] == i)
        ticks = np.flatnonzero(runs & (self.schedule.chunk[:, s] == c)).tolist()
        return f"it runs in tick {', '.join(map(str, ticks))}" if ticks else "it never runs"

    def _fail(self, kind: str, s: int, t: int | None, i: int, expected: str) -> NoReturn:
        tick = "of a route that no tick uses" if t is None else f"tick {t}"
        raise ValueError(
            f"schedule {self.schedule.name!r}: {kind} at stage {s}, {tick}, "
            f"microbatch {i if i >= 0 else 'none'}: {expected}"
        )
