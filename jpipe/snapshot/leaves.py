"""A state's arrays by name, and a state of given arrays, though it be cut into other stages.

A state holds `Params`: the parameters, and whatever the optimizer keeps for them. How many stages
there are decides whether the blocks of their bodies are stacked, and how; so what a name stands for
is noted, the blocks in it, and they are found again wherever they lie in another layout.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jpipe.optim import PerDevice
from jpipe.pipeline import Params, PerStage
from jpipe.pipeline.per_stage import chunks_of

Tree = Any
Arrays = Mapping[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Place:
    """What of a model a leaf holds.

    Attributes:
        name: of the leaf, unique in its state.
        part: of what it is a part: the leaf's name but for its blocks.
        first: number of its first block; None if it has none.
        stacked: how many blocks are stacked in it; None if it is one block, or has none.
        own: whether each device has its own, see `jpipe.optim.PerDevice`.
    """

    name: str
    part: str
    first: int | None = None
    stacked: int | None = None
    own: bool = False


def places(state: Tree) -> list[Place]:
    """A place for each leaf of a state, in the order of its leaves."""
    return list(_places("", state))


def _places(prefix: str, tree: Tree) -> Iterator[Place]:
    def stop(node: Any) -> bool:
        return isinstance(node, Params | PerDevice)

    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stop):
        name = prefix + jax.tree_util.keystr(path)
        if isinstance(node, PerDevice):
            yield Place(name, name, own=True)
        elif isinstance(node, Params):
            yield from _places(f"{name}.stem", node.stem)
            yield from _places_of_body(f"{name}.body", node.body)
            yield from _places(f"{name}.head", node.head)
        else:
            yield Place(name, name)


def _places_of_body(prefix: str, body: Any) -> Iterator[Place]:
    several, before = len(chunks_of(body)) > 1, 0
    for c, chunk in enumerate(chunks_of(body)):
        at = f"{prefix}[{c}]" if several else prefix
        if isinstance(chunk, PerStage):
            for s, own in enumerate(chunk):
                yield from _places_of_stage(f"{at}[{s}]", prefix, own)
            continue
        count = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(chunk):
            suffix = jax.tree_util.keystr(path)
            if not jnp.ndim(leaf):
                yield Place(at + suffix, at + suffix)
                continue
            count = leaf.shape[0]
            yield Place(at + suffix, prefix + suffix, before, count)
        before += count


def _places_of_stage(at: str, prefix: str, own: Any) -> Iterator[Place]:
    numbered = isinstance(own, dict) and all(isinstance(k, int) for k in own)
    for path, _ in jax.tree_util.tree_leaves_with_path(own):
        name = at + jax.tree_util.keystr(path)
        if numbered:
            yield Place(name, prefix + jax.tree_util.keystr(path[1:]), path[0].key)
        else:
            yield Place(name, name)


def raw(leaf: jax.Array) -> jax.Array:
    """A leaf as plain numbers: the data of a typed PRNG key."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class MismatchError(ValueError):
    """A snapshot is that of another model or optimizer."""


def rebuild(state: Tree, stored: Mapping[str, Place], arrays: Arrays) -> tuple[Tree, list[str]]:
    """A state with the arrays of another.

    Args:
        state: a state of the structure, shapes and shardings that are wanted: arrays, or
            `jax.ShapeDtypeStruct`, which take no memory.
        stored: what each array holds.
        arrays: by name.

    Returns:
        The state, and the names of what was left as it is in `state`: what each device has of its
        own, where its blocks are others than before.

    Raises:
        MismatchError: if an array is missing, left over, or of another shape or dtype; or if what
            would be left as it is has a shape only.
    """
    leaves, structure = jax.tree.flatten(state)
    moved = _blocks(stored.values()) != _blocks(places(state))
    found, left, unused = [], [], set(arrays)
    blocks = {
        (place.part, place.first + k): (place, k)
        for place in stored.values()
        if place.first is not None
        for k in range(place.stacked or 1)
    }

    def one_block(part: str, number: int) -> NDArray[Any]:
        if (part, number) not in blocks:
            raise MismatchError(f"the snapshot has no {part} of block {number}")
        place, k = blocks[part, number]
        unused.discard(place.name)
        array = arrays[place.name]
        return array if place.stacked is None else array[k]

    for leaf, place in zip(leaves, places(state), strict=True):
        wanted = jax.eval_shape(raw, leaf)
        if not wanted.size:
            found.append(_put(np.zeros(wanted.shape, wanted.dtype), leaf))
            continue
        array = arrays.get(place.name)
        same = array is not None and array.shape == wanted.shape
        if place.own and (moved or not same):
            if not isinstance(leaf, jax.Array):
                raise MismatchError(
                    f"{place.name} is what each device has of its own, and on this mesh or "
                    "schedule it begins anew; give arrays for it, as a fresh state has them"
                )
            left.append(place.name)
            unused.discard(place.name)
            found.append(leaf)
            continue
        if place.first is not None and not same:
            if place.stacked is None:
                array = one_block(place.part, place.first)
            else:
                numbers = range(place.first, place.first + place.stacked)
                array = np.stack([one_block(place.part, k) for k in numbers])
        if array is None:
            raise MismatchError(f"the snapshot has no {place.name}")
        unused.discard(place.name)
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            raise MismatchError(
                f"{place.name} is {wanted.dtype}{list(wanted.shape)} here and "
                f"{array.dtype}{list(array.shape)} in the snapshot"
            )
        found.append(_put(array, leaf))
    unused -= {name for name in unused if stored[name].own}
    if unused:
        raise MismatchError(f"the snapshot has {sorted(unused)[0]}, which is unknown here")
    return jax.tree.unflatten(structure, found), left


def _blocks(stored: Iterable[Place]) -> set[tuple[str, int, int | None]]:
    """Which blocks lie together, by which it is known where each lies."""
    return {(p.name, p.first, p.stacked) for p in stored if p.first is not None}


def _put(array: NDArray[Any], like: Any) -> jax.Array:
    """An array where another lies, or shall lie."""
    sharding = like.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    new = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    if not _is_key(like):
        return new
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(new, impl=kinds[0])
