"""A model of how long the backward phase takes: the schedule simulated, the reduction added.

The backward phase is the time from the start of a step until all gradients are averaged, less the
time of a pipeline of the forwards alone. Of GPipe that is what passes from the first backward on.
"""

import dataclasses
import functools

import numpy as np
from hlo import Exchange
from targets import STAGES, Block, Programs, period

from jpipe.schedule import (
    CostModel,
    Simulation,
    forward_only_schedule,
    make_schedule,
    simulate_schedule,
)

FASTEST = 1e13
"""Bytes per second of a link faster than any."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins two devices.

    Attributes:
        name: what it is.
        bytes_per_second: one way.
        latency: seconds from start to end of an exchange of nothing.
    """

    name: str
    bytes_per_second: float
    latency: float

    def seconds(self, num_bytes: float, messages: float = 1.0) -> float:
        """Time of so many bytes, in so many messages."""
        return messages * self.latency + num_bytes / self.bytes_per_second


# NVIDIA H100 SXM datasheet: 989e12 dense operations per second in bfloat16, 3.35e12 bytes per
# second of memory, NVLink 900e9 bytes per second both ways, PCIe 5 128e9 both ways; PCIe 4 half of
# that; InfiniBand NDR 400e9 bits per second. Latencies are assumptions.
PEAK, MEMORY = 989e12, 3.35e12
NVLINK = Link("NVLink", 450e9, 3e-6)
NDR = Link("InfiniBand NDR", 50e9, 8e-6)
LINKS = [
    NVLINK,
    Link("PCIe 5", 64e9, 5e-6),
    NDR,
    Link("PCIe 4", 32e9, 5e-6),
    Link("100 Gb Ethernet", 12.5e9, 20e-6),
    Link("25 Gb Ethernet", 3.125e9, 30e-6),
    Link("10 Gb Ethernet", 1.25e9, 30e-6),
]


@dataclasses.dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        flops: operations per second that are reached.
        memory: bytes per second, at best.
        memory_reached: the same where so many operations are.
        link: what joins the stages.
    """

    flops: float
    memory: float
    memory_reached: float
    link: Link


@dataclasses.dataclass(frozen=True)
class Method:
    """What a compiled reduction costs a device.

    Attributes:
        wire_bytes: over `data`.
        messages: over `data`.
        traffic: bytes of memory.
    """

    wire_bytes: float
    messages: int
    traffic: float


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What is switched on.

    Attributes:
        method: of the reduction.
        overlap: whether the gradients of a block travel once its last backward is done, and not
            after the last backward of all.
        recompute: whether a backward computes its forward again.
        each: whether XLA sums after each microbatch instead.
    """

    method: str = "none"
    overlap: bool = False
    recompute: bool = False
    each: bool = False


EACH = Configuration(each=True)
PLAIN = Configuration()
COMPRESSED = Configuration("onebit")
OVERLAPPED = Configuration(overlap=True)
ALL = Configuration("onebit", overlap=True)
AGAIN = Configuration(recompute=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A pipeline of given costs.

    Attributes:
        blocks: of each stage.
        device: each of them.
        num_microbatches: M.
        activation_bytes: that a microbatch sends from stage to stage.
        methods: by name.
        share_out: bytes on the wire and messages over `stage` after the loop.
        sums: what each stage exchanges over `data` in a body of the loop, where XLA sums gradients
            after each microbatch.
    """

    blocks: list[list[Block]]
    device: Device
    num_microbatches: int
    activation_bytes: float
    methods: dict[str, Method]
    share_out: tuple[float, int]
    sums: list[list[Exchange]]

    def seconds(self, configuration: Configuration, link: Link | None) -> float:
        """Time of the backward phase; without a link over `data`, of a reduction that is free."""
        extra = [0.0] * STAGES
        if configuration.each and link:
            extra = [self._exposed(own, link) for own in self.sums]
        run = self._run(configuration.recompute, tuple(extra))
        method = self.methods[configuration.method]
        if link is None or configuration.each:
            end = run.makespan
        elif configuration.overlap:
            end = self._overlapped(run, method, configuration.recompute, link)
        else:
            end = run.makespan + self._moving(method, link) + method.messages * link.latency
        return end + self.device.link.seconds(*self.share_out) - self._forwards

    def _exposed(self, sums: list[Exchange], link: Link) -> float:
        """How much longer a microbatch takes, if what runs beside an exchange hides it."""
        left = (
            max(0.0, link.seconds(e.wire_bytes) - e.beside / self.device.memory_reached)
            for e in sums
        )
        return sum(left) / period()

    def _overlapped(self, run: Simulation, method: Method, recompute: bool, link: Link) -> float:
        """When all gradients are averaged, if those of a block are once its last backward is done.

        As in the compiled program each device averages its share of all gradients.
        """
        ready = []
        for s, own in enumerate(self.blocks):
            now = float(np.nanmax(run.end[:, s]))
            for block in own:  # the first is done last
                ready.append((now, block.num_params))
                now -= self._backward(block, recompute)
        total = sum(count for _, count in ready)
        sent = 0.0
        for now, count in sorted(ready):
            sent = max(now, sent) + count / total * self._moving(method, link)
        return max(run.makespan, sent) + method.messages * link.latency

    def _moving(self, method: Method, link: Link) -> float:
        """Time to encode, send and decode all gradients, latency aside."""
        return method.traffic / self.device.memory + method.wire_bytes / link.bytes_per_second

    def _backward(self, block: Block, recompute: bool) -> float:
        return (block.backward + recompute * block.forward) / self.device.flops

    @functools.cached_property
    def _forward_seconds(self) -> list[float]:
        return [sum(b.forward for b in own) / self.device.flops for own in self.blocks]

    @functools.cached_property
    def _exchange(self) -> float:
        return self.device.link.seconds(self.activation_bytes)

    @functools.cached_property
    def _forwards(self) -> float:
        table = forward_only_schedule(STAGES, self.num_microbatches)
        costs = CostModel(self._forward_seconds, link=self._exchange)
        return simulate_schedule(table, costs).makespan

    @functools.cache  # noqa: B019  # lives as long as the model
    def _run(self, recompute: bool, extra: tuple[float, ...]) -> Simulation:
        backward = [
            sum(self._backward(b, recompute) for b in own) + more
            for own, more in zip(self.blocks, extra, strict=True)
        ]
        costs = CostModel(self._forward_seconds, backward, self._exchange)
        return simulate_schedule(make_schedule("1f1b", STAGES, self.num_microbatches), costs)


def model_of(
    programs: Programs, blocks: list[list[Block]], num_microbatches: int, efficiency: float
) -> Model:
    """The model of the phase, from what the compiled programs hold."""
    step, by_xla = programs.once[0], programs.by_xla[0]
    permuted, permutes = step.over("stage", "in")
    reached = efficiency / roof(programs, blocks)
    return Model(
        blocks=blocks,
        device=Device(PEAK * efficiency, MEMORY, MEMORY * reached, NVLINK),
        num_microbatches=num_microbatches,
        activation_bytes=permuted / permutes,
        methods={
            name: Method(*program.over("data", "after"), program.traffic)
            for name, program in programs.reductions.items()
        },
        share_out=step.over("stage", "after"),
        sums=by_xla.sums_by_stage,
    )


def saving(model: Model, before: Configuration, after: Configuration, link: Link | None) -> float:
    """How much shorter the phase is, as a share of what it was."""
    return 1 - model.seconds(after, link) / model.seconds(before, link)


def fastest_link(
    model: Model, before: Configuration, after: Configuration, target: float, latency: float
) -> float | None:
    """The most bytes per second over `data` at which the saving still is what it should be."""
    for rate in np.geomspace(FASTEST, 1e7, 1400):
        if saving(model, before, after, Link("", float(rate), latency)) >= target:
            return float(rate)
    return None


def roof(programs: Programs, blocks: list[list[Block]]) -> float:
    """The share of the peak at which the compiled loop moves memory as fast as it can."""
    flops = sum(b.forward + b.backward for own in blocks for b in own)
    return flops / (programs.once[0].loop_traffic / period() / MEMORY) / PEAK
