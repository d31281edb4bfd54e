"""What a model carries beside its parameters: what moves, and what stays as it is."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.pipeline.per_stage import chunks_of

Tree = Any


class Variables(NamedTuple):
    """All that a model, or a part of one, holds; each a `Params`, or a part of one.

    Attributes:
        params: what is differentiated.
        constant: state that stays as it is.
        moving: state that microbatches update.
    """

    params: Tree
    constant: Tree
    moving: Tree

    def part(self, name: str) -> "Variables":
        """Those of `stem`, `body` or `head`."""
        return Variables(*(getattr(kind, name) for kind in self))

    def chunks(self) -> "tuple[Variables, ...]":
        """Those of a body, by chunk."""
        return tuple(map(Variables, *map(chunks_of, self)))


class State(NamedTuple):
    """State cut in two; each half has None where the other has an array.

    Attributes:
        moving: what the updates of a microbatch replace.
        constant: what none does, such as frozen parameters.
    """

    moving: Tree
    constant: Tree

    def whole(self) -> Tree:
        """Both halves together."""
        return jax.tree.map(
            lambda a, b: b if a is None else a, self.moving, self.constant, is_leaf=_is_none
        )


def cut_state(state: Tree, updates: Tree) -> State:
    """Cut state by what its updates replace.

    Args:
        state: pytree of arrays, or of anything in their place.
        updates: the same with None where nothing changes.
    """
    return State(
        jax.tree.map(lambda a, u: None if u is None else a, state, updates),
        jax.tree.map(lambda a, u: a if u is None else None, state, updates),
    )


def check_updates(part: str, state: Tree, updates: Tree) -> None:
    """Refuse updates that do not fit what they replace.

    Args:
        part: `stem`, `body` or `head`, whose they are.
        state: arrays, or their shapes and dtypes.
        updates: the same for the updates, with None where nothing changes.

    Raises:
        ValueError: naming both.
    """
    structure: Any
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    try:
        news = structure.flatten_up_to(updates)
    except ValueError as error:
        raise ValueError(
            f"the updates of the {part}'s state do not have its structure, with None where nothing "
            f"changes: {error}"
        ) from error
    for (path, old), new in zip(paths, news, strict=True):
        if new is not None and _describe(old) != _describe(new):
            raise ValueError(
                f"state.{part}{jax.tree_util.keystr(path)} is {_describe(old)}, its update is "
                f"{_describe(new)}; state must keep shape and dtype"
            )


def _describe(array: Any) -> str:
    return f"{array.dtype}{list(jnp.shape(array))}"


def _is_none(node: Any) -> bool:
    return node is None
