"""A mean over workers of matrices, exchanged as two thin factors.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019 (arXiv 1905.13727), Algorithms 1 and 2: one power iteration a step, started
from the factor of the step before, with the error fed back. The last two dims of an array are its
matrix; the dims before them number matrices, as in stacked blocks. Arrays that would not
get smaller travel as they are.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Shape = tuple[int, ...]

_DEPENDENT = 1e-4  # norm of what is left of a column of norm 1, below which it is mere rounding


def is_compressed(shape: Shape, rank: int) -> bool:
    """Whether the factors of an array's matrices are smaller than the array."""
    if len(shape) < 2 or not math.prod(shape):
        return False
    rows, columns = shape[-2:]
    return rank * (rows + columns) < rows * columns


def first_factors(shapes: Sequence[Shape], rank: int) -> jax.Array:
    """Right factors to begin with, of all compressed arrays in one float32 vector."""
    key = jax.random.key(0)  # any will do, but all workers need the same
    sizes = [math.prod(s) for s in _factor_shapes(shapes, rank)]
    return jax.random.normal(key, (sum(sizes),), jnp.float32)


def powersgd_mean(
    arrays: Sequence[jax.Array],
    errors: jax.Array,
    factors: jax.Array,
    *,
    rank: int,
    axis: str,
    feedback: bool = True,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """The mean over the devices of a mesh axis; to be called where the axis is manual.

    Args:
        arrays: float32, this worker's.
        errors: float32 vector, what the factors have not said yet of the compressed arrays.
        factors: float32 vector, the right factors of the step before.
        rank: columns of a factor.
        axis: the mesh axis.
        feedback: whether errors are fed back.

    Returns:
        The means, the errors and the right factors.
    """
    workers = jax.lax.axis_size(axis)

    def mean(parts: list[jax.Array]) -> list[jax.Array]:
        """One exchange for all."""
        total = jax.lax.psum(_join(parts), axis) / workers
        return _split(total, [p.shape for p in parts])

    shapes = [a.shape for a in arrays]
    chosen = [k for k, shape in enumerate(shapes) if is_compressed(shape, rank)]
    others = [k for k in range(len(arrays)) if k not in chosen]
    matrices = [arrays[k] for k in chosen]
    if feedback:
        told = _split(errors, [m.shape for m in matrices])
        matrices = [m + e for m, e in zip(matrices, told, strict=True)]
    before = _split(factors, _factor_shapes(shapes, rank))

    lefts = [m @ q for m, q in zip(matrices, before, strict=True)]
    *lefts, rest = mean([*lefts, _join([arrays[k] for k in others])])
    lefts = [_orthogonal(p) for p in lefts]
    rights = mean([m.mT @ p for m, p in zip(matrices, lefts, strict=True)])
    found = [p @ q.mT for p, q in zip(lefts, rights, strict=True)]

    if feedback:
        errors = _join([m - f for m, f in zip(matrices, found, strict=True)])
    # A column of zeros would stay zero for ever.
    kept = [
        jnp.where((q != 0).any(-2, keepdims=True), q, b)
        for q, b in zip(rights, before, strict=True)
    ]
    results: dict[int, Any] = dict(zip(chosen, found, strict=True))
    results |= dict(zip(others, _split(rest, [shapes[k] for k in others]), strict=True))
    return [results[k] for k in range(len(arrays))], errors, _join(kept)


def num_errors(shapes: Sequence[Shape], rank: int) -> int:
    """Numbers in all compressed arrays."""
    return sum(math.prod(s) for s in shapes if is_compressed(s, rank))


def _factor_shapes(shapes: Sequence[Shape], rank: int) -> list[Shape]:
    return [(*s[:-2], s[-1], rank) for s in shapes if is_compressed(s, rank)]


def _orthogonal(factor: jax.Array) -> jax.Array:
    """Columns made orthonormal one after another, as in the paper.

    A column that follows from those before it is zero, not the direction of its rounding errors.
    """
    columns: list[jax.Array] = []
    for k in range(factor.shape[-1]):
        column, _ = _normalized(factor[..., k])
        for other in columns:
            column = column - (other * column).sum(-1, keepdims=True) * other
        rest, left = _normalized(column)
        columns.append(jnp.where(left < _DEPENDENT, 0.0, rest) if k else rest)
    return jnp.stack(columns, -1)


def _normalized(column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Columns of norm 1, or 0, and their norms; squares of small numbers do not vanish."""
    largest = jnp.abs(column).max(-1, keepdims=True)
    ratios = column / jnp.where(largest == 0, 1, largest)
    norm = jnp.sqrt((ratios**2).sum(-1, keepdims=True))
    return ratios / jnp.where(norm == 0, 1, norm), largest * norm


def _join(parts: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.zeros(0, jnp.float32), *[p.ravel() for p in parts]])


def _split(joined: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    found, first = [], 0
    for shape in shapes:
        size = math.prod(shape)
        found.append(joined[first : first + size].reshape(shape))
        first += size
    return found
