"""What a compiled program exchanges, and what memory it moves: read from its text."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
}
_NO_TRAFFIC = {"after-all", "bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
_BITS = {"pred": 8, "bf16": 16}
_LINE = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:calls|body|branch_computations|(?:true|false)_computation)=([^=]*)[,}]")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: its name, operation, bytes of its result, and what it reads and runs."""

    name: str
    opcode: str
    num_bytes: int
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str
    is_root: bool


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective.

    Attributes:
        axis: the mesh axis along which it runs, or `both`.
        place: `before`, `in` or `after` the loop over ticks.
        wire_bytes: what a device sends, if the collective is a ring or direct.
        beside: bytes of memory that other operations move between its start and its end.
    """

    axis: str
    place: str
    wire_bytes: float
    beside: int


class Compiled:
    """A program over a mesh of stages x data.

    Args:
        text: what `compiled.as_text()` returns.
        num_stages: P.
        num_data: replicas.
    """

    def __init__(self, text: str, num_stages: int, num_data: int) -> None:
        self._num_stages, self._num_data = num_stages, num_data
        self._computations: dict[str, list[Instruction]] = {}
        for line in text.splitlines():
            if header := re.match(r"^(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                current = self._computations.setdefault(header[2], [])
                self._entry = header[2] if header[1] else ""
            elif found := _LINE.match(line):
                current.append(_instruction(found))
        self._made = {i.name: i for own in self._computations.values() for i in own}
        # The entry is the last computation of a program.
        order = self._computations[self._entry]
        loops = [k for k, i in enumerate(order) if i.opcode == "while"]
        self._loop = loops[0] if loops else -1  # a program without a loop lies after it
        self._body = order[loops[0]].called[0] if loops else None

    def over(self, axis: str, place: str) -> tuple[float, int]:
        """Bytes on the wire and messages of a device along an axis, in one place."""
        found = [e.wire_bytes for e in self.exchanges if (e.axis, e.place) == (axis, place)]
        return sum(found), len(found)

    @functools.cached_property
    def exchanges(self) -> list[Exchange]:
        """All collectives, those of branches too."""
        found = [self._exchange(i, "in", 0) for i in self._within(self._body)]
        order = self._computations[self._entry]
        for k, i in enumerate(order):
            place = "before" if k < self._loop else "after"
            found.append(self._exchange(i, place, self._beside(order, k)))
        return [e for e in found if e is not None]

    @property
    def sums_by_stage(self) -> list[list[Exchange]]:
        """Collectives over `data` in the loop over ticks, by the stage whose branch they are in.

        Stem and head have branches of their own: these count as the last stage's, as nearly all
        of their parameters are the head's.
        """
        found: list[list[Exchange]] = [[] for _ in range(self._num_stages)]
        self._gather(self._body, None, found)
        return found

    @property
    def loop_traffic(self) -> int:
        """Bytes of memory that all branches of the loop over ticks read and write, together."""
        return sum(map(self._traffic, self._within(self._body)))

    @property
    def traffic(self) -> int:
        """Bytes of memory that a program without a loop reads and writes."""
        return sum(map(self._traffic, self._within(self._entry)))

    def _gather(self, computation: str | None, stage: int | None, found: list[Any]) -> None:
        order = self._computations.get(computation or "", [])
        for j, i in enumerate(order):
            exchange = self._exchange(i, "in", self._beside(order, j))
            if exchange and exchange.axis == "data":
                found[-1 if stage is None else stage].append(exchange)
            by_stage = i.opcode == "conditional" and len(i.called) == self._num_stages
            for k, called in enumerate(i.called if i.opcode != "fusion" else ()):
                self._gather(called, k if by_stage else stage, found)

    def _within(self, computation: str | None) -> Iterator[Instruction]:
        """What runs in a computation, in its branches and in what it calls."""
        for i in self._computations.get(computation or "", []):
            yield i
            for called in i.called if i.opcode != "fusion" else ():
                yield from self._within(called)

    def _exchange(self, i: Instruction, place: str, beside: int) -> Exchange | None:
        kind = i.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            return None
        if kind == "collective-permute":
            return Exchange("stage", place, self._operand_bytes(i), beside)
        groups = _groups(i.text) or [list(range(self._num_stages * self._num_data))]
        stages, replicas = (
            {divmod(device, self._num_data)[k] for device in groups[0]} for k in (0, 1)
        )
        axis = "both" if min(len(stages), len(replicas)) > 1 else "stage"
        axis = "data" if len(stages) == 1 else axis
        size = len(groups[0])
        sent = {"all-reduce": 2 / size, "all-gather": 1.0}.get(kind, 1 / size) * (size - 1)
        return Exchange(axis, place, sent * self._operand_bytes(i), beside)

    def _beside(self, order: list[Instruction], k: int) -> int:
        ends = [j for j, i in enumerate(order) if order[k].name in i.operands and "-done" in i.text]
        return sum(map(self._traffic, order[k + 1 : ends[0]])) if ends else 0

    def _operand_bytes(self, i: Instruction) -> int:
        return sum(self._made[name].num_bytes for name in i.operands)

    def _traffic(self, i: Instruction) -> int:
        if i.opcode in _NO_TRAFFIC | {"while", "conditional", "call"} or i.opcode.endswith("-done"):
            return 0
        if i.opcode == "fusion":
            return self._fusion_traffic(i.called[0])
        return i.num_bytes + self._operand_bytes(i)

    @functools.cache  # noqa: B019  # lives as long as the program
    def _fusion_traffic(self, fusion: str) -> int:
        """A fusion reads no more of an operand than the slices that it takes of it."""
        inside = self._computations[fusion]
        read = sum(self._read(inside, i) for i in inside if i.opcode == "parameter")
        return read + sum(self._written(i) for i in inside if i.is_root)

    def _read(self, inside: list[Instruction], source: Instruction) -> int:
        total = 0
        for user in (i for i in inside if source.name in i.operands):
            first = user.operands[0] == source.name
            if user.opcode == "bitcast":
                total += self._read(inside, user)
            elif first and user.opcode in ("slice", "dynamic-slice", "gather"):
                total += user.num_bytes
            elif not (first and user.opcode == "dynamic-update-slice"):
                return source.num_bytes
        return min(total, source.num_bytes)

    def _written(self, i: Instruction) -> int:
        if i.opcode in ("tuple", "bitcast"):
            return sum(self._written(self._made[name]) for name in i.operands)
        if i.opcode == "dynamic-update-slice":
            return self._made[i.operands[1]].num_bytes
        return i.num_bytes


def _instruction(found: re.Match[str]) -> Instruction:
    root, name, shape, opcode, rest = found.groups()
    rest = re.sub(r"/\*.*?\*/", "", rest)
    reads, _, attributes = rest.partition(")")
    attributes = attributes.partition("metadata=")[0]
    called = re.findall(r"%([\w.\-]+)", " ".join(_CALLED.findall(attributes + ",")))
    return Instruction(
        name=name,
        opcode=opcode,
        num_bytes=_num_bytes(shape),
        operands=tuple(re.findall(r"%([\w.\-]+)", reads)),
        called=tuple(called),
        text=f"{opcode}({attributes}",
        is_root=bool(root),
    )


def _num_bytes(shape: str) -> int:
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        bits = _BITS.get(dtype, int(re.sub(r"\D", "", dtype) or 0))
        total += bits // 8 * math.prod(int(d) for d in dims.split(",") if d)
    return total


def _groups(text: str) -> list[list[int]]:
    """Which devices take part together, in either way that XLA writes it."""
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
        return [[int(d) for d in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", listed[1])]
    written = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not written:
        return []
    shape, dims = ([int(d) for d in written[k].split(",")] for k in (1, 2))
    order = [int(d) for d in written[3].split(",")] if written[3] else range(len(dims))
    devices = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    return devices.reshape(shape).tolist()
