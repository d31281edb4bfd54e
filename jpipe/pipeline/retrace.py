"""Tell the user when functions made anew for every call are compiled anew for every call."""

import collections
import warnings
from collections.abc import Hashable

from jpipe.pipeline.losses import Loss
from jpipe.pipeline.per_stage import PerStage
from jpipe.pipeline.stages import Stages

_LIMIT = 3
_compiled: collections.Counter[Hashable] = collections.Counter()


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
    codes = tuple(getattr(f, "__code__", f) for f in functions)
    _compiled[key := (codes, rest)] += 1
    if _compiled[key] >= _LIMIT:
        warnings.warn(
            f"the same program was compiled {_compiled[key]} times, for a loss or stages that are "
            "new functions with the same code; define them once, outside of the training loop, and "
            "keep the function that jpipe returns",
            RuntimeWarning,
            stacklevel=2,
        )
