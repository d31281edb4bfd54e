"""Tell the user when functions made anew for every call are compiled anew for every call."""

import collections
import warnings
from collections.abc import Callable, Hashable
from typing import Any

_LIMIT = 3
_compiled: collections.Counter[Hashable] = collections.Counter()


def warn_if_compiled_again(functions: dict[str, Callable[..., Any]], *rest: Hashable) -> None:
    """Count one compilation; warn from the third on for the same code and the same shapes.

    JAX tells functions apart by identity: a lambda written inside a training loop is a new function
    in every step. Call this while tracing.

    Args:
        functions: by argument name, the functions that the program is compiled for.
        *rest: what else a new compilation may be due to, such as shapes.
    """
    codes = tuple(getattr(f, "__code__", f) for f in functions.values())
    _compiled[key := (codes, rest)] += 1
    if _compiled[key] >= _LIMIT:
        warnings.warn(
            f"the same program was compiled {_compiled[key]} times, for functions "
            f"({', '.join(functions)}) that are new objects with the same code; define them once, "
            "outside of the training loop, and keep the function that jpipe returns",
            RuntimeWarning,
            stacklevel=2,
        )
