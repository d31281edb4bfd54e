"""A pipeline schedule as a table of ticks by stages.

A schedule is data: NumPy arrays that say which operation a stage runs in which tick, and which
neighbours exchange what it made. Builders make such tables, `check` proves one right, `simulate`
costs it, `draw` shows it, and one executor runs any of them.
"""

import dataclasses
import enum
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Route = tuple[tuple[int, int], ...]
"""The (source, destination) stages of one exchange: a partial permutation of the stages."""


class Op(enum.IntEnum):
    """What a stage does in one tick."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Which stage runs which operation on which microbatch in which tick.

    A stage runs at most one operation in a tick. What it makes in tick `t` (an activation for the
    next stage, or a gradient for the previous one) leaves along `routes[route[t]]` and is used by
    the neighbour in tick `t + hop`.

    With `hop` 1 the exchange of tick `t` lies between ticks `t` and `t + 1`, so nothing hides it.
    With `hop` 2 it runs beside the operations of tick `t + 1`.

    Attributes:
        name: what the schedule is called on the command line.
        num_stages: P, the number of columns.
        num_microbatches: M.
        op: int8 `[ticks, stages]`, values of `Op`.
        microbatch: int32 `[ticks, stages]`, the microbatch of each operation, -1 where idle.
        chunk: int32 `[ticks, stages]`, which of a stage's model chunks runs, -1 where idle. Chunk
            `c` of stage `s` is the virtual stage `c * num_stages + s`.
        hop: ticks between making a tensor and the neighbour's use of it.
        routes: the different exchanges that occur, each a set of (source, destination) stages.
        route: int32 `[ticks]`, index into `routes` of the exchange that carries what tick `t` made.
        num_chunks: model chunks per stage.
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

    @property
    def num_ticks(self) -> int:
        """Rows of the table."""
        return self.op.shape[0]

    def tick_of(self, op: Op) -> NDArray[np.int32]:
        """The tick in which each operation of one kind runs.

        Args:
            op: `Op.FORWARD` or `Op.BACKWARD`.

        Returns:
            int32 `[num_microbatches, num_chunks * num_stages]`, indexed by microbatch and virtual
            stage; -1 where the table has no such operation.
        """
        ticks = np.full((self.num_microbatches, self.num_chunks * self.num_stages), -1, np.int32)
        t, s = np.nonzero(self.op == op)
        ticks[self.microbatch[t, s], self.chunk[t, s] * self.num_stages + s] = t
        return ticks


def chain(num_stages: int, *, up: bool) -> Route:
    """The route on which every stage sends to its next (`up`) or its previous neighbour."""
    pairs = [(s, s + 1) if up else (s + 1, s) for s in range(num_stages - 1)]
    return tuple(pairs)


def from_ticks(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    forward_tick: Callable[[int, int], int] | None,
    backward_tick: Callable[[int, int], int] | None,
    hop: int,
    routes: tuple[Route, ...],
    route_of_tick: Callable[[int], int],
) -> Schedule:
    """Lay out a table from the tick of each forward and backward.

    Args:
        name: the schedule's name.
        num_stages: P, at least 1.
        num_microbatches: M, at least 1.
        forward_tick: `(microbatch, stage) -> tick` of F; None for a table without F.
        backward_tick: the same for B; None for a table without B.
        hop: ticks between making a tensor and the neighbour's use of it.
        routes: the different exchanges.
        route_of_tick: which of them carries what a tick made.

    Raises:
        ValueError: if `num_stages` or `num_microbatches` is below 1, or if two operations fall
            into one cell.
    """
    for argument, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{argument}={value} must be at least 1")
    cells: dict[tuple[int, int], tuple[Op, int]] = {}
    for op, tick in ((Op.FORWARD, forward_tick), (Op.BACKWARD, backward_tick)):
        if tick is None:
            continue
        for i in range(num_microbatches):
            for s in range(num_stages):
                cell = (tick(i, s), s)
                if cell in cells:
                    raise ValueError(
                        f"schedule {name!r} puts two operations into tick {cell[0]} of stage {s}: "
                        f"microbatches {cells[cell][1]} and {i}"
                    )
                cells[cell] = (op, i)
    num_ticks = 1 + max((t for t, _ in cells), default=-1)
    ops = np.full((num_ticks, num_stages), Op.IDLE, np.int8)
    microbatch = np.full((num_ticks, num_stages), -1, np.int32)
    for cell, (op, i) in cells.items():
        ops[cell], microbatch[cell] = op, i
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        op=ops,
        microbatch=microbatch,
        chunk=np.where(microbatch >= 0, 0, -1).astype(np.int32),
        hop=hop,
        routes=routes,
        route=np.array([route_of_tick(t) for t in range(num_ticks)], np.int32),
    )
