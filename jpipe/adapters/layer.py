"""A layer of a Flax model as the adapters see it, whichever API it was written in."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jpipe.pipeline.stages import Part

Tree = Any
Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A function of its own variables, and where these lie in the model.

    Variables are nested dicts of arrays; a path is the tuple of keys that leads to one.

    Attributes:
        name: what to call it in messages.
        kind: the type of its module, the same.
        train: the layer as it trains, a `Part`.
        evaluate: the layer as it is evaluated.
        params: shapes and dtypes of its parameters by path.
        state: the same for its state.
        places: for each path of both, the path in the model's plain form.
        signature: equal for layers that differ in their variables' values only.
        partition: for some paths of parameters, how to lay them over mesh axes but `stage`.
    """

    name: str
    kind: str
    train: Part
    evaluate: Part
    params: dict[Path, jax.ShapeDtypeStruct]
    state: dict[Path, jax.ShapeDtypeStruct]
    places: Mapping[Path, Path]
    signature: Any
    partition: Mapping[Path, jax.sharding.PartitionSpec]

    @property
    def shapes(self) -> tuple[Tree, Tree]:
        """Parameters and state as nested dicts."""
        return unflatten_dict(self.params), unflatten_dict(self.state)

    def difference(self, other: "Layer") -> str | None:
        """How another layer differs from this one, if it does."""
        if self.signature != other.signature:
            return (
                f"{other.name}, a {other.kind}, is built otherwise than {self.name}, a {self.kind}"
            )
        mine, theirs = (
            {p: (a.shape, str(a.dtype)) for p, a in (layer.params | layer.state).items()}
            for layer in (self, other)
        )
        for path in mine.keys() | theirs.keys():
            if mine.get(path) != theirs.get(path):
                return (
                    f"{'.'.join(map(str, path))} of {other.name} differs in shape or dtype from "
                    f"that of {self.name}: {theirs.get(path)} and {mine.get(path)}"
                )
        return None


def flat(tree: Tree) -> dict[Path, Any]:
    """A nested dict by path."""
    found: dict[Path, Any] = flatten_dict(tree)
    return found


def nested(values: Mapping[Path, Any]) -> Tree:
    """The inverse of `flat`."""
    return unflatten_dict(values)


def keep_changed(
    name: str, known: Mapping[Path, Any], call: Callable[..., tuple[Tree, dict[Path, Any]]]
) -> Part:
    """A `Part` of a function that returns all of its state, changed or not.

    Args:
        name: what to call it in messages.
        known: the state that the model has, by path.
        call: `(params, state, x, key) -> (y, new state by path)`.

    Raises:
        ValueError: while traced, if the state is not that of the model, or the call adds to it.
    """

    def part(params: Tree, state: Tree, x: Tree, key: Any) -> tuple[Tree, Tree]:
        before = flat(state) if state else {}
        if before.keys() != known.keys():
            lacking = ".".join(map(str, min(known.keys() ^ before.keys(), key=str)))
            raise ValueError(
                f"the state of {name} and the given one differ in {lacking}; "
                "pass state=, what init returns beside the parameters"
            )
        y, after = call(params, nested(before), x, key)
        made = [".".join(map(str, path)) for path in after.keys() - before.keys()]
        if made:
            raise ValueError(
                f"the call of {name} made variables that the model did not have: "
                f"{', '.join(sorted(made))}; make them in the constructor, or do not collect "
                "intermediates in a pipeline"
            )
        # A value that comes out as the very object that went in is never changed.
        changed = {p: None if after.get(p, old) is old else after[p] for p, old in before.items()}
        return y, nested(changed) if state else state

    return part
