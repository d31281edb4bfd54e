"""Where to cut a sequence of layers into stages."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

Tree = Any


def balanced_split(
    costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Cut layers into stages so that the costliest stage costs as little as possible.

    Args:
        costs: of each layer, at least 0, in any unit.
        num_stages: P, at most the number of layers.
        first: what the first stage costs beside its layers.
        last: what the last stage costs beside its layers.

    Returns:
        The split points: the first layer of each stage but the first. Every stage gets a layer.

    Raises:
        ValueError: if there are fewer layers than stages.
    """
    n = len(costs)
    if num_stages > n:
        raise ValueError(
            f"{n} layers cannot be cut into {num_stages} stages; use at most {n} stages"
        )
    before = [0.0, *itertools.accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        beside = first * (stage == 0) + last * (stage == num_stages - 1)
        return before[stop] - before[start] + beside

    # best[k]: the least costliest stage, and its cuts, with the first k layers cut into so many.
    best: dict[int, tuple[float, tuple[int, ...]]] = {k: (cost(0, 0, k), ()) for k in range(1, n)}
    best[n] = (cost(0, 0, n), ())
    for stage in range(1, num_stages):
        best = {
            k: min((max(best[j][0], cost(stage, j, k)), (*best[j][1], j)) for j in range(stage, k))
            for k in range(stage + 1, n + 1)
        }
    return best[n][1]


def check_split_points(split_points: Sequence[int], num_layers: int, num_stages: int) -> None:
    """Refuse cuts that are not one for each stage but the first, rising, inside the layers.

    Raises:
        ValueError: naming them.
    """
    cuts = [0, *split_points, num_layers]
    if len(split_points) != num_stages - 1 or any(a >= b for a, b in itertools.pairwise(cuts)):
        raise ValueError(
            f"split_points={tuple(split_points)} must be {num_stages - 1} rising numbers between 1 "
            f"and {num_layers - 1}: the first layer of each of {num_stages} pieces but the first"
        )


def flops(function: Callable[..., Any], *arguments: Tree) -> float:
    """Floating-point operations of a function, as XLA counts them; nothing is compiled.

    Args:
        function: any traceable function.
        *arguments: arrays, or their shapes and dtypes.
    """
    analysis: Any = jax.jit(function).lower(*arguments).cost_analysis()
    return float((analysis or {}).get("flops", 0.0))
