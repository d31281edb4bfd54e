"""A body in several pieces: stages that differ, and chunks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")


class _Several(Generic[T]):
    """A pytree whose children are the pieces."""

    def __init__(self, *pieces: T) -> None:
        self._pieces = pieces

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_with_keys_class(cls)

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[T]:
        return iter(self._pieces)

    def __getitem__(self, index: int) -> T:
        return self._pieces[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._pieces!r}"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, T]], None]:
        """The children, each with its number."""
        keys = map(jax.tree_util.SequenceKey, range(len(self)))
        return list(zip(keys, self._pieces, strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Any:
        """The inverse."""
        return cls(*children)


class PerStage(_Several[T]):
    """One thing for each stage: its function, or its parameters.

    Where all stages are alike, a body needs none: one function and stacked parameters do.

    Args:
        *of_stage: what belongs to stage 0, 1, ...
    """


class Chunks(_Several[T]):
    """One thing for each chunk of a body, where every stage has several.

    Chunk 0 is the first part of the body, cut into as many pieces as there are stages, chunk 1 the
    next, and so on: an activation goes through all stages once for each chunk. With V chunks the
    bubble of the schedule `interleaved` is V times smaller. They lie so, too, where a schedule lets
    every other chunk run in the other direction (`zero-bubble-v`).

    Args:
        *of_chunk: what belongs to chunk 0, 1, ...: what a body without chunks is, or its
            parameters.
    """


def chunks_of(body: Any) -> tuple[Any, ...]:
    """The chunks of a body, or of anything of its structure."""
    return tuple(body) if isinstance(body, Chunks) else (body,)


def map_chunks(function: Callable[..., Any], body: Any, *others: Any) -> Any:
    """A function of each chunk; the result has chunks if the first body has."""
    pieces = zip(*map(chunks_of, (body, *others)), strict=True)
    return like_chunks(body, [function(*own) for own in pieces])


def like_chunks(body: Any, pieces: Sequence[Any]) -> Any:
    """The pieces as a body of the same structure as another."""
    return Chunks(*pieces) if isinstance(body, Chunks) else pieces[0]
