"""Bytes that a device sends over a mesh axis in a step, read from a compiled program's text.

For programs that XLA compiled for CPUs; W devices take part in an exchange. All of an all-to-all
but a device's own part is sent, a device's part of an all-gather to each of the others, a
reduce-scatter and an all-reduce run around a ring (Patarasuk and Yuan, "Bandwidth Optimal
All-reduce Algorithms for Clusters of Workstations", 2009).
"""

import math
import re
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_EXCHANGE = re.compile(
    r" = (?P<result>.*?) (?P<kind>all-reduce|all-to-all|all-gather|reduce-scatter)\("
    r".*?replica_groups=\{(?P<groups>\{.*?\})\}"
)
_BRANCHES = re.compile(r" conditional\(.*branch_computations=\{(.*?)\}")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


class Sent(NamedTuple):
    """Bytes that a device sends in a step.

    Attributes:
        always: in every step.
        branches: beside that, in each branch of a conditional; () without one that exchanges.
    """

    always: float
    branches: tuple[float, ...]


def bytes_sent(text: str, mesh: Mesh, axis: str = "data") -> Sent:
    """Bytes that a device sends in a step to devices elsewhere along a mesh axis.

    Args:
        text: what `compiled.as_text()` returns.
        mesh: the mesh that it was compiled for.
        axis: the mesh axis.

    Raises:
        ValueError: if an exchange is neither in the program's entry nor in a branch of it.
    """
    entry, current = "", ""
    sent: dict[str, float] = {}
    branches: list[tuple[str, ...]] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = header[2]
            entry = current if header[1] else entry
        elif found := _EXCHANGE.search(line):
            group = [int(i) for i in re.findall(r"\d+", found["groups"].split("}")[0])]
            if _crosses(group, mesh, axis):
                size = _size(found["result"])
                sent[current] = sent.get(current, 0) + size * _share(found["kind"], len(group))
        elif found := _BRANCHES.search(line):
            branches.append(tuple(name.strip(" %") for name in found[1].split(",")))
    always = sent.pop(entry, 0.0)
    used = [names for names in branches if sent.keys() & set(names)]
    if len(used) > 1 or sent.keys() - set(*used):
        raise ValueError(f"exchanges in {', '.join(sent)}, which may run more than once a step")
    return Sent(always, tuple(sent.get(name, 0.0) for name in used[0]) if used else ())


def _crosses(group: list[int], mesh: Mesh, axis: str) -> bool:
    """Whether the devices, by their place in the mesh, differ along the axis."""
    places = np.unravel_index(group, mesh.devices.shape)
    return len(set(places[mesh.axis_names.index(axis)])) > 1


def _share(kind: str, devices: int) -> float:
    """What a device sends, over the size of its result."""
    others = devices - 1
    return {
        "all-to-all": others / devices,
        "all-gather": others / devices,
        "all-reduce": 2 * others / devices,
        "reduce-scatter": others,
    }[kind]


def _size(result: str) -> int:
    """Bytes of an array, or of a tuple of them."""
    return sum(
        _BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in _ARRAY.findall(result)
    )
