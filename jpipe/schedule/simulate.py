"""How long a table takes: a discrete-event simulation of who waits for whom.

Ticks are no barrier. Each stage walks its own ticks in order and waits only where it exchanges:
for its partners to arrive, and for the link. So the time of a schedule depends on its routes as
much as on its operations, and an idle tick costs nothing.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jpipe.schedule.slots import assign_slots
from jpipe.schedule.table import Op, Route, Schedule, chain


@dataclasses.dataclass(frozen=True)
class CostModel:
    """What operations and exchanges cost, all in one arbitrary unit of time.

    Attributes:
        forward: time of the forward of a whole stage, above 0: one number, or one for each stage.
            If a stage has several chunks, each takes an equal share.
        backward: time of the backward of a whole stage, the same way.
        link: time of one exchange, at least 0. Both directions of a link run at once.
        weight: how much of the backward is the gradient of the parameters, above 0 and below 1, for
            tables that split it.

    Raises:
        ValueError: if a cost is out of range.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    link: float = 0.0
    weight: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1:
            raise ValueError(f"weight={self.weight} must be a share above 0 and below 1")
        for name in ("forward", "backward"):
            cost = np.asarray(getattr(self, name), float)
            if cost.ndim > 1 or not cost.size or not (np.isfinite(cost) & (cost > 0)).all():
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a finite time above 0, "
                    "or one such time for each stage"
                )
        if not (np.isfinite(self.link) and self.link >= 0):
            raise ValueError(f"link={self.link} must be a finite time of at least 0")

    def per_stage(self, op: Op, schedule: Schedule) -> NDArray[np.float64]:
        """The time of one kind of operation of a table on each stage.

        Args:
            op: any; `Op.IDLE` costs nothing.
            schedule: the table.

        Returns:
            float64 `[num_stages]`.

        Raises:
            ValueError: if the model names costs for another number of stages.
        """
        num_stages = schedule.num_stages
        if op == Op.IDLE:
            return np.zeros(num_stages)
        name = "forward" if op == Op.FORWARD else "backward"
        cost = np.asarray(getattr(self, name), np.float64)
        if cost.ndim and cost.shape != (num_stages,):
            raise ValueError(
                f"{name}={getattr(self, name)} must be one number or one for each of the "
                f"{num_stages} stages"
            )
        share = {Op.FORWARD: 1.0, Op.BACKWARD: 1.0 - self.weight, Op.WEIGHT: self.weight}[op]
        if op == Op.BACKWARD and not schedule.splits_backward:
            share = 1.0
        return np.broadcast_to(cost * share / schedule.num_chunks, (num_stages,))


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """What a simulation found. Times are in the unit of the cost model.

    Attributes:
        start: float64 `[ticks, stages]`, when each operation starts; nan where idle.
        end: float64 `[ticks, stages]`, when it ends; nan where idle.
        wait: float64 `[ticks, stages]`, how long the exchange of a tick holds its stage up.
        makespan: when the last stage leaves its last tick.
        idle: float64 `[stages]`, how much of the makespan a stage does not compute.
        bubble: the share of all stages' time that is idle, in [0, 1).
        peak_kept: int32 `[stages]`, the most microbatches a stage keeps at a time; of a chunk each,
            if it has several.
    """

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    wait: NDArray[np.float64]
    makespan: float
    idle: NDArray[np.float64]
    bubble: float
    peak_kept: NDArray[np.int32]


def simulate_schedule(schedule: Schedule, costs: CostModel) -> Simulation:
    """Find out when everything in a table happens.

    With hop 1, the stages joined by an edge of the route of tick `t` meet after their operations
    of tick `t`: the exchange starts when both have arrived, takes `costs.link`, and both go on
    when it ends. A stage with two partners waits for both, one without an edge goes on at once,
    and so does one whose next operation is a weight gradient, which needs nothing that arrives: it
    waits for the exchange afterwards. (Not where the route is picked at run time, see
    `Schedule.period`.)

    With hop 2, the exchange of what tick `t` made starts when both ends have begun tick `t + 1`
    and runs beside its operations. A stage leaves tick `t + 1` when both are done.

    Args:
        schedule: a table that `check_schedule` accepts.
        costs: what operations and exchanges cost.

    Raises:
        ValueError: if the costs are for another number of stages, or the hop is not 1 or 2.
    """
    if schedule.hop not in (1, 2):
        raise ValueError(f"hop={schedule.hop} of schedule {schedule.name!r} must be 1 or 2")
    num_stages = schedule.num_stages
    cost_by_op = np.stack([costs.per_stage(op, schedule) for op in Op])
    work = cost_by_op[schedule.op, np.arange(num_stages)]
    meets = [_partners(route, num_stages) for route in schedule.routes]

    begin, finish, leave = (np.zeros(schedule.op.shape) for _ in range(3))
    now, pending = np.zeros(num_stages), np.zeros(num_stages)
    known = schedule.period is not None
    for t in range(schedule.num_ticks):
        begin[t], finish[t] = now, now + work[t]
        now = np.maximum(finish[t], pending)
        if schedule.hop == 1:
            done = _exchange(now, meets[schedule.route[t]], costs.link, now)
            beside = schedule.op[t + 1 : t + 2] == Op.WEIGHT
            hides = beside[0] if known and len(beside) else np.zeros(num_stages, np.bool_)
            now, pending = np.where(hides, now, done), np.where(hides, done, 0.0)
        elif t > 0:
            now = _exchange(begin[t], meets[schedule.route[t - 1]], costs.link, now)
        leave[t] = now

    makespan = float(now.max())
    idle = np.maximum(makespan - work.sum(axis=0), 0.0)
    runs = schedule.op != Op.IDLE
    return Simulation(
        start=np.where(runs, begin, np.nan),
        end=np.where(runs, finish, np.nan),
        wait=leave - finish,
        makespan=makespan,
        idle=idle,
        bubble=float(idle.mean()) / makespan,
        peak_kept=assign_slots(schedule).per_stage,
    )


def with_chain_exchange(schedule: Schedule) -> Schedule:
    """The same table, but the whole chain exchanges both ways in every tick.

    For comparison: it shows what it costs that stages with nothing to exchange meet.
    """
    both = chain(schedule.num_stages, up=True) + chain(schedule.num_stages, up=False)
    return dataclasses.replace(
        schedule,
        name=f"{schedule.name}, whole chain",
        routes=(both,),
        route=np.zeros_like(schedule.route),
    )


def _partners(route: Route, num_stages: int) -> NDArray[np.bool_]:
    """Who meets whom: bool `[stages, stages]`, symmetric; an empty row is a stage without edge."""
    meets = np.zeros((num_stages, num_stages), np.bool_)
    for a, b in route:
        if a == b:  # nothing travels
            continue
        meets[[a, a, b, b], [a, b, a, b]] = True
    return meets


def _exchange(
    arrive: NDArray[np.float64],
    meets: NDArray[np.bool_],
    link: float,
    done: NDArray[np.float64],
) -> NDArray[np.float64]:
    """When each stage is through with an exchange and with its own work, done at `done`."""
    meet: NDArray[np.float64] = np.where(meets, arrive, -np.inf).max(axis=1)
    return np.asarray(np.maximum(done, meet + link))
