"""Tell the user when functions made anew for every call are compiled anew for every call."""

import inspect
import warnings
from collections.abc import Hashable
from typing import Any

from jpipe.pipeline.losses import Loss
from jpipe.pipeline.per_stage import PerStage
from jpipe.pipeline.stages import Stages

_LIMIT = 3
_compiled: dict[Hashable, dict[tuple[int, ...], Any]] = {}


def warn_if_compiled_again(stages: Stages, loss: Loss, *rest: Hashable) -> None:
    """Count one compilation; warn from the third on for the same code and the same shapes.

    JAX tells functions apart by identity: a lambda written inside a training loop is a new function
    in every step. Call this while tracing.

    Args:
        stages: the model that the program is compiled for.
        loss: its loss.
        *rest: what else a new compilation may be due to, such as shapes.
    """
    bodies = tuple(stages.body) if isinstance(stages.body, PerStage) else (stages.body,)
    functions = (stages.stem, *bodies, stages.head, loss)
    # The first few are kept, so that none of their ids is used again.
    seen = _compiled.setdefault((tuple(map(_origin, functions)), rest), {})
    if (made := tuple(map(id, functions))) in seen:
        return
    if len(seen) < _LIMIT:
        seen[made] = functions
    if len(seen) == _LIMIT:
        warnings.warn(
            f"the same program was compiled at least {_LIMIT} times, for a loss or stages that are "
            "new functions with the same code; define them once, outside of the training loop, and "
            "keep the function that jpipe returns",
            RuntimeWarning,
            stacklevel=2,
        )


def _origin(value: Any, depth: int = 4) -> Hashable:
    """What two functions share that the same line made of the same things."""
    code = getattr(value, "__code__", None)
    if code is None:
        return value if isinstance(value, Hashable) else repr(type(value))
    inner = inspect.getclosurevars(value).nonlocals if depth and inspect.isfunction(value) else {}
    return code, tuple(_origin(inner[name], depth - 1) for name in sorted(inner))
