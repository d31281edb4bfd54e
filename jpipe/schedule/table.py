"""A pipeline schedule as a table of ticks by stages.

A schedule is data: NumPy arrays that say which operation a stage runs in which tick, and which
neighbours exchange what it made. Builders make such tables, `check` proves one right, `simulate`
costs it, `draw` shows it, and one executor runs any of them.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Route = tuple[tuple[int, int], ...]
"""The (source, destination) stages of one exchange. A stage sends the same to all its destinations,
and hears at most from its previous and from its next neighbour."""


class Op(enum.IntEnum):
    """What a stage does in one tick."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    WEIGHT = 3
    """The gradient of the parameters, where a table splits it from that of the input: a backward
    then is the gradient of the input alone."""

    @property
    def letter(self) -> str:
        """What pictures and files call it."""
        return "·FBW"[self]


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Which stage runs which operation on which microbatch in which tick.

    A stage runs at most one operation in a tick. What it makes in tick `t` (an activation for the
    next stage, or a gradient for the previous one) leaves along `routes[route[t]]` and can be used
    by the neighbour from tick `t + hop` on; until then it waits in the neighbour's inbox.

    With `hop` 1 the exchange lies between ticks `t` and `t + 1`, and only a weight gradient in tick
    `t + 1`, which needs nothing that arrives, runs beside it. With `hop` 2 it runs beside all
    operations of tick `t + 1`.

    Attributes:
        name: what the schedule is called on the command line.
        num_stages: P, the number of columns.
        num_microbatches: M.
        op: int8 `[ticks, stages]`, values of `Op`.
        microbatch: int32 `[ticks, stages]`, the microbatch of each operation, -1 where idle.
        chunk: int32 `[ticks, stages]`, which of a stage's model chunks runs, -1 where idle. Chunk
            `c` of stage `s` is the virtual stage `c * num_stages + s`; if the table is folded, and
            `c` odd, it is `c * num_stages + num_stages - 1 - s`.
        hop: least ticks between making a tensor and the neighbour's use of it.
        routes: the different exchanges that occur, each a set of (source, destination) stages.
        route: int32 `[ticks]`, index into `routes` of the exchange that carries what tick `t` made.
        num_chunks: model chunks per stage.
        folded: whether every other chunk goes back over the stages, from the last to the first, so
            that the last stage hands on to itself, and the whole model ends where it begins.
    """

    name: str
    num_stages: int
    num_microbatches: int
    op: NDArray[np.int8]
    microbatch: NDArray[np.int32]
    chunk: NDArray[np.int32]
    hop: int
    routes: tuple[Route, ...]
    route: NDArray[np.int32]
    num_chunks: int = 1
    folded: bool = False

    @property
    def num_ticks(self) -> int:
        """Rows of the table."""
        return self.op.shape[0]

    @property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return bool((self.op == Op.BACKWARD).any())

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are operations of their own."""
        return bool((self.op == Op.WEIGHT).any())

    @property
    def last(self) -> int:
        """The last virtual stage."""
        return self.num_chunks * self.num_stages - 1

    @functools.cached_property
    def virtual_stage(self) -> NDArray[np.int32]:
        """int32 `[ticks, stages]`, which virtual stage runs; meaningless where idle."""
        stages = np.arange(self.num_stages, dtype=np.int32)
        back = self.folded & (self.chunk % 2 == 1)
        nth = np.where(back, self.num_stages - 1 - stages, stages)
        return (self.chunk * np.int32(self.num_stages) + nth).astype(np.int32)

    def stage_of(self, v: int) -> int:
        """The stage that runs a virtual stage."""
        c, nth = divmod(v, self.num_stages)
        return nth_of_chunk(nth, c, self.num_stages, folded=self.folded)

    @property
    def period(self) -> int | None:
        """Ticks after which the routes repeat; None if they do not, as in GPipe.

        Where they repeat the exchange of a tick is known when a program is compiled. Elsewhere it
        is picked at run time, and nothing can run beside it.
        """
        period = min(len(self.routes), self.num_ticks)
        repeats = np.array_equal(self.route, np.resize(self.route[:period], self.num_ticks))
        return period if repeats else None

    def user_of(self, op: Op, v: int) -> int | None:
        """The virtual stage that uses what an operation on virtual stage `v` makes, if any."""
        user = {Op.FORWARD: v + 1, Op.BACKWARD: v - 1}.get(op, -1)
        return user if 0 <= user <= self.last else None

    def source_of(self, op: Op, v: int) -> int | None:
        """The virtual stage that makes what an operation on virtual stage `v` needs, if any."""
        source = {Op.FORWARD: v - 1, Op.BACKWARD: v + 1}.get(op, -1)
        return source if 0 <= source <= self.last else None

    def tick_of(self, op: Op) -> NDArray[np.int32]:
        """The tick in which each operation of one kind runs.

        Args:
            op: any but `Op.IDLE`.

        Returns:
            int32 `[num_microbatches, num_chunks * num_stages]`, indexed by microbatch and virtual
            stage; -1 where the table has no such operation.
        """
        ticks = np.full((self.num_microbatches, self.last + 1), -1, np.int32)
        t, s = np.nonzero(self.op == op)
        ticks[self.microbatch[t, s], self.virtual_stage[t, s]] = t
        return ticks


def nth_of_chunk(stage: Any, chunk: int, num_stages: int, *, folded: bool) -> Any:
    """Which piece of a chunk a stage runs, from 0; and, as well, which stage runs a piece.

    Args:
        stage: number of the stage, or of the piece; may be an array.
        chunk: which chunk.
        num_stages: P.
        folded: see `Schedule`.
    """
    return num_stages - 1 - stage if folded and chunk % 2 else stage


def chain(num_stages: int, *, up: bool, ring: bool = False) -> Route:
    """The route on which every stage sends to its next (`up`) or its previous neighbour.

    Args:
        num_stages: P.
        up: the direction.
        ring: whether the last stage's next neighbour is the first.
    """
    pairs = [(s, (s + 1) % num_stages) for s in range(num_stages if ring else num_stages - 1)]
    return tuple(pairs if up else [(b, a) for a, b in pairs])


def lanes(num_stages: int, route: Route) -> tuple[Route, ...]:
    """Cut a route into permutes: in each a stage sends once and hears once at most.

    One where that will do, else first what goes to the next neighbours, then the rest; and what
    stages hand on to themselves, if they do.
    """
    stays = tuple(edge for edge in route if edge[0] == edge[1])
    goes = tuple(edge for edge in route if edge not in stays)
    own = (stays,) if stays else ()
    sources, destinations = zip(*goes, strict=True) if goes else ((), ())
    if len(set(sources)) == len(set(destinations)) == len(goes):
        return (goes, *own) if goes or not own else own
    up = tuple(edge for edge in goes if edge[1] == (edge[0] + 1) % num_stages)
    return (up, tuple(edge for edge in goes if edge not in up), *own)


_LONGEST_PERIOD = 4

Cell = tuple[Op, int, int]
"""An operation, its microbatch and its chunk."""


def from_cells(
    name: str,
    num_stages: int,
    num_microbatches: int,
    cells: Mapping[tuple[int, int], Cell],
    *,
    hop: int = 1,
    num_chunks: int = 1,
    folded: bool = False,
    routes: tuple[Route, ...] | None = None,
    route_of_tick: Callable[[int], int] = lambda t: 0,
) -> Schedule:
    """Lay out a table.

    Args:
        name: the schedule's name.
        num_stages: P.
        num_microbatches: M.
        cells: what runs in which (tick, stage).
        hop: least ticks between making a tensor and the neighbour's use of it.
        num_chunks: model chunks per stage.
        folded: whether every other chunk goes back.
        routes: the different exchanges; None for what each tick needs, and no more; with hop 2, for
            a few in turn if that will do.
        route_of_tick: which of them carries what a tick made.
    """
    num_ticks = 1 + max((t for t, _ in cells), default=-1)
    shape = num_ticks, num_stages
    op, microbatch, chunk = np.zeros(shape, np.int8), np.full(shape, -1), np.full(shape, -1)
    for where, cell in cells.items():
        op[where], microbatch[where], chunk[where] = cell
    schedule = Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        op=op,
        microbatch=microbatch.astype(np.int32),
        chunk=chunk.astype(np.int32),
        hop=hop,
        routes=routes or (),
        route=np.array([route_of_tick(t) for t in range(num_ticks)], np.int32),
        num_chunks=num_chunks,
        folded=folded,
    )
    return schedule if routes is not None else _with_needed_routes(schedule)


def _with_needed_routes(schedule: Schedule) -> Schedule:
    """The table with the exchanges that its ticks need."""
    needed: list[Route] = []
    for t in range(schedule.num_ticks):
        edges = []
        for s in range(schedule.num_stages):
            v = int(schedule.virtual_stage[t, s])
            user = schedule.user_of(Op(int(schedule.op[t, s])), v)
            edges += [] if user is None else [(s, schedule.stage_of(user))]
        needed.append(tuple(sorted(edges)))
    # Where a few routes in turn will do, a program knows the exchange of every tick when it is
    # compiled, and can run it beside operations. Of these take those that join the fewest.
    turns = [_in_turn(needed, period) for period in range(1, _LONGEST_PERIOD + 1)]
    single = [r for r in turns if all(len(lanes(schedule.num_stages, own)) == 1 for own in r)]
    if schedule.hop == 2 and single:
        best = min(single, key=lambda r: sum(map(len, r)) / len(r))
        ticks = np.arange(schedule.num_ticks, dtype=np.int32)
        return dataclasses.replace(schedule, routes=best, route=ticks % len(best))
    routes = tuple(dict.fromkeys(needed))
    route = np.array([routes.index(edges) for edges in needed], np.int32)
    return dataclasses.replace(schedule, routes=routes, route=route)


def _in_turn(needed: Sequence[Route], period: int) -> tuple[Route, ...]:
    """Routes in turn that have all that ticks need."""
    return tuple(
        tuple(sorted({edge for edges in needed[k::period] for edge in edges}))
        for k in range(period)
    )


def from_ticks(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    forward_tick: Callable[[int, int], int] | None,
    backward_tick: Callable[[int, int], int] | None,
    weight_tick: Callable[[int, int], int] | None = None,
    hop: int,
    routes: tuple[Route, ...],
    route_of_tick: Callable[[int], int],
    num_chunks: int = 1,
) -> Schedule:
    """Lay out a table from the tick of each forward and backward.

    Args:
        name: the schedule's name.
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.
        forward_tick: `(microbatch, virtual stage) -> tick` of F; None for a table without F.
        backward_tick: the same for B; None for a table without B.
        weight_tick: the same for W; None where the backward is not split.
        hop: least ticks between making a tensor and the neighbour's use of it.
        routes: the different exchanges.
        route_of_tick: which of them carries what a tick made.
        num_chunks: model chunks per stage.

    Raises:
        ValueError: if a number is below 1, or if two operations fall into one cell.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
    cells: dict[tuple[int, int], Cell] = {}
    ticks = {Op.FORWARD: forward_tick, Op.BACKWARD: backward_tick, Op.WEIGHT: weight_tick}
    for op, tick in ticks.items():
        if tick is None:
            continue
        for i in range(num_microbatches):
            for v in range(num_stages * num_chunks):
                c, s = divmod(v, num_stages)
                cell = tick(i, v), s
                if cell in cells:
                    raise ValueError(
                        f"schedule {name!r} puts two operations into tick {cell[0]} of stage {s}: "
                        f"microbatches {cells[cell][1]} and {i}"
                    )
                cells[cell] = op, i, c
    return from_cells(
        name,
        num_stages,
        num_microbatches,
        cells,
        hop=hop,
        num_chunks=num_chunks,
        routes=routes,
        route_of_tick=route_of_tick,
    )


def check_counts(**counts: int) -> None:
    """Refuse numbers of stages, microbatches or chunks below 1.

    Raises:
        ValueError: naming the number.
    """
    for argument, value in counts.items():
        if value < 1:
            raise ValueError(f"{argument}={value} must be at least 1")
