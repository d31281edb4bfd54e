"""Tell the user when functions made anew for every call are compiled anew for every call."""

import types
import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from jpipe.pipeline.losses import Loss
from jpipe.pipeline.per_stage import PerStage, chunks_of
from jpipe.pipeline.stages import Stages

_LIMIT = 3
_Seen = tuple[Callable[[], Any], ...]
_compiled: dict[Hashable, list[_Seen]] = {}


def warn_if_compiled_again(stages: Stages, loss: Loss, *rest: Hashable) -> None:
    """Note one compilation; warn from the third on for new functions of the same code.

    JAX tells functions apart by identity: a lambda written inside a training loop is a new function
    in every step. Call this while tracing.

    Args:
        stages: the model that the program is compiled for.
        loss: its loss.
        *rest: what else a new compilation may be due to, such as shapes.
    """
    bodies = [
        function
        for body in chunks_of(stages.body)
        for function in (body if isinstance(body, PerStage) else [body])
    ]
    functions = (stages.stem, *bodies, stages.head, loss)
    seen = _compiled.setdefault((tuple(map(_origin, functions)), rest), [])
    for known in seen:
        if all(ref() is f for ref, f in zip(known, functions, strict=True)):
            return  # the same functions, for arguments that lie elsewhere
    if len(seen) < _LIMIT:
        seen.append(tuple(map(_refer, functions)))
    if len(seen) == _LIMIT:
        warnings.warn(
            f"the same program was compiled at least {_LIMIT} times, for a loss or stages that are "
            "new functions with the same code; define them once, outside of the training loop, and "
            "keep the function that jpipe returns",
            RuntimeWarning,
            stacklevel=2,
        )


def _refer(function: Any) -> Callable[[], Any]:
    """A weak reference where there can be one, so that nothing is kept alive."""
    try:
        return weakref.ref(function)
    except TypeError:
        return lambda: function


def _origin(value: Any, depth: int = 4) -> Hashable:
    """What two functions share that the same line made of like things; never looks at values."""
    if not isinstance(value, types.FunctionType) or not depth:
        return getattr(value, "__qualname__", None), type(value)
    return value.__code__, tuple(
        _origin(_content(cell), depth - 1) for cell in value.__closure__ or ()
    )


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
