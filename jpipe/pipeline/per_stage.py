"""Stages that differ: something of each, in order."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")


@jax.tree_util.register_pytree_with_keys_class
class PerStage(Generic[T]):
    """One thing for each stage: its function, or its parameters.

    A pytree whose children are those of the stages. Where all stages are alike, a body needs none:
    one function and stacked parameters do.

    Args:
        *of_stage: what belongs to stage 0, 1, ...
    """

    def __init__(self, *of_stage: T) -> None:
        self._of_stage = of_stage

    def __len__(self) -> int:
        return len(self._of_stage)

    def __iter__(self) -> Iterator[T]:
        return iter(self._of_stage)

    def __getitem__(self, stage: int) -> T:
        return self._of_stage[stage]

    def __repr__(self) -> str:
        return f"PerStage{self._of_stage!r}"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, T]], None]:
        """The children, each with the stage's number."""
        keys = map(jax.tree_util.SequenceKey, range(len(self)))
        return list(zip(keys, self._of_stage, strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "PerStage[Any]":
        """The inverse."""
        return cls(*children)
