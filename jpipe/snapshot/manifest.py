"""What a snapshot holds, with a checksum of everything, itself included."""

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jpipe.integrity import crc32_of
from jpipe.snapshot.leaves import Place

FILE = "manifest.json"


class DamageError(Exception):
    """What was written is not what is read."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of an array that one device held.

    Attributes:
        ranges: start and stop of each dim.
        crc32: of its bytes.
    """

    ranges: tuple[tuple[int, int], ...]
    crc32: int


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a snapshot.

    Attributes:
        place: what it holds.
        shards: its parts; together they are the whole.
    """

    place: Place
    shards: tuple[Shard, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a snapshot holds.

    Attributes:
        step: steps made before it.
        microbatch: of the step after that, about so many microbatches are finished.
        leaves: by name.
        extra: what else belongs to it, fit for JSON: data cursor, configuration.
    """

    step: int
    microbatch: int
    leaves: Mapping[str, Leaf]
    extra: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """As JSON, with a checksum."""
        content = json.dumps(
            {
                "step": self.step,
                "microbatch": self.microbatch,
                "leaves": [dataclasses.asdict(leaf) for leaf in self.leaves.values()],
                "extra": self.extra,
            },
            allow_nan=False,
        )
        return f'{{"crc32": {zlib.crc32(content.encode())}, "content":\n{content}\n}}\n'.encode()

    @staticmethod
    def from_bytes(written: bytes) -> "Manifest":
        """The inverse.

        Raises:
            DamageError: if a byte differs.
        """
        try:
            head, content, tail = written.decode().split("\n", 2)
            crc32 = json.loads(f'{head} ""}}')["crc32"]
            if tail != "}\n" or zlib.crc32(content.encode()) != crc32:
                raise DamageError("the manifest's checksum is wrong")
            fields = json.loads(content)
            leaves = [
                Leaf(
                    Place(**leaf["place"]),
                    tuple(
                        Shard(tuple((a, b) for a, b in shard["ranges"]), shard["crc32"])
                        for shard in leaf["shards"]
                    ),
                )
                for leaf in fields["leaves"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise DamageError(f"the manifest is not readable: {error}") from error
        by_name = {leaf.place.name: leaf for leaf in leaves}
        return Manifest(fields["step"], fields["microbatch"], by_name, fields["extra"])

    def check(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Compare arrays with their checksums.

        Raises:
            DamageError: naming the first that differs.
        """
        for name, leaf in self.leaves.items():
            for shard in leaf.shards:
                index = tuple(slice(a, b) for a, b in shard.ranges)
                found = crc32_of(arrays[name][index])
                if found != shard.crc32:
                    raise DamageError(
                        f"{name}{_describe(shard.ranges)} has the CRC32 {found:08x}, it was "
                        f"{shard.crc32:08x} when it was saved"
                    )


Copies = list[tuple[Place, list[tuple[tuple[tuple[int, int], ...], NDArray[Any]]]]]
"""For each array what of it lies on devices of this process, copied to the host."""


def copy_shards(array: jax.Array) -> list[tuple[tuple[tuple[int, int], ...], NDArray[Any]]]:
    """The parts of an array that this process answers for, copied to the host.

    Of parts that several devices hold, the process of the first answers for it.
    """
    return [
        (
            tuple(s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)),
            np.array(shard.data),
        )
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def checked(copies: Copies) -> list[Leaf]:
    """The copies' checksums."""
    return [
        Leaf(place, tuple(Shard(ranges, crc32_of(part)) for ranges, part in parts))
        for place, parts in copies
    ]


def merge(parts: Sequence[Mapping[str, Leaf]]) -> dict[str, Leaf]:
    """One set of leaves of those that each process answers for."""
    names = {name: leaf.place for part in parts for name, leaf in part.items()}
    return {
        name: Leaf(place, tuple(s for part in parts if name in part for s in part[name].shards))
        for name, place in names.items()
    }


def _describe(ranges: Sequence[tuple[int, int]]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in ranges) + "]" if ranges else ""
