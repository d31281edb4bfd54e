"""Which dtype for what: parameters, computing, and the operations that need more than that.

Micikevicius et al., "Mixed Precision Training", 2018 (arXiv 1710.03740): parameters and sums stay
in float32, products are made in half of that, and what divides by or sums up many numbers (norms,
softmax, the loss) is not trusted to it. float16 needs `jpipe.optim.dynamic_loss_scale` as well.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@dataclasses.dataclass(frozen=True)
class Policy:
    """Names of the dtypes of a model.

    Attributes:
        param: of parameters, of which a copy is cast where they are used.
        compute: of everything not named below, and of what travels between stages.
        output: of what the head returns; losses and sums over microbatches are made in at least
            float32, whatever it is.
        norm: of layer and batch norms.
        softmax: of the softmax of an attention.
    """

    param: str = "float32"
    compute: str = "float32"
    output: str = "float32"
    norm: str = "float32"
    softmax: str = "float32"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = getattr(self, field.name)
            try:
                known = jnp.issubdtype(jnp.dtype(name), jnp.floating)
            except TypeError:
                known = False
            if not known:
                raise ValueError(
                    f"{field.name}={name!r} is no floating-point dtype; use float32, bfloat16, "
                    "float16 or float64"
                )

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with all floating-point arguments and results cast to `compute`.

        What is decorated with `computes_in`, the function itself or one that it calls, has dtypes
        of its own and keeps them.
        """
        declared = hasattr(function, _DECLARED)
        return function if declared else computes_in(self.compute, self.compute)(function)


POLICIES = {
    "fp32": Policy(),
    "bf16": Policy(compute="bfloat16"),
    "fp16": Policy(compute="float16"),
}
"""The policies by the names that the command knows."""

_DECLARED = "__jpipe_dtype__"


def computes_in(
    dtype: jax.typing.DTypeLike, result: jax.typing.DTypeLike | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare what a function computes in, whatever the dtypes around it.

    ```python
    @computes_in("float32")
    def softmax(scores):  # of float16 scores: computed in float32, returned in float16
        return jax.nn.softmax(scores)
    ```

    Args:
        dtype: what floating-point arguments are cast to, in pytrees, too.
        result: what floating-point results are cast to; None for the narrowest dtype of the
            arguments, or for `dtype` if there are none.

    Returns:
        A decorator.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = [a.dtype for a in jax.tree.leaves((args, kwargs)) if _is_floating(a)]
            after = result or min(given, key=lambda d: d.itemsize, default=dtype)
            args, kwargs = cast((args, kwargs), dtype)
            return cast(function(*args, **kwargs), after)

        setattr(run, _DECLARED, True)
        return run

    return decorate


def cast(tree: Tree, dtype: jax.typing.DTypeLike) -> Tree:
    """The same pytree with floating-point arrays in another dtype; all else as it is."""
    return jax.tree.map(lambda a: a.astype(dtype) if _is_floating(a) else a, tree)


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
