"""Cut a backward in two: the gradient of the input, and that of the parameters.

The first is what the previous stage waits for. What it computes on the way and the second needs is
left for it, so that the second computes nothing again but what is cheap, as in `residuals`, or
follows from parameters or keys alone. So the two multiply as many matrices as the whole.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), who cut by module. Here the
cut goes through the program that JAX's autodiff makes, whatever the modules are. What one operation
makes together, as a loop does, counts as part of the first half.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jpipe.pipeline.residuals import (
    SplitGradient,
    cheapest_to_keep,
    inline,
    shape_of,
    subprogram,
)

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class SplitBackward:
    """A backward, cut in two.

    Attributes:
        left: shapes and dtypes of what the first half leaves for the second.
        inputs: `(params, again, kept values, gradient of y) -> (gradient of x, left values)`.
        weights: `(params, again, kept values, left values) -> gradients of params`.
    """

    left: list[jax.ShapeDtypeStruct]
    inputs: Callable[[Tree, Tree, Sequence[jax.Array], Tree], tuple[Tree, list[jax.Array]]]
    weights: Callable[[Tree, Tree, Sequence[jax.Array], Sequence[jax.Array]], Tree]


def split_backward(split: SplitGradient, params: Tree, again: Tree, y: Tree) -> SplitBackward:
    """Cut the backward of a split gradient for arguments of the given shapes and dtypes.

    Args:
        split: the gradient.
        params: the parameters.
        again: what the backward has as well as the forward.
        y: the function's output.
    """
    trees: dict[str, Any] = {}

    def backward(params: Tree, again: Tree, kept: list[jax.Array], dy: Tree) -> list[list[Any]]:
        parts = split.backward(params, again, kept, dy)
        leaves, trees["all"] = zip(*map(jax.tree.flatten, parts), strict=True)
        return list(leaves)

    # A recomputation counts by what is in it, or nothing could be cut.
    program, (dparams_shapes, _) = jax.make_jaxpr(backward, return_shape=True)(
        params, again, split.kept, y
    )
    program = inline(program, ("jit", "remat2"))
    dparams_tree, dx_tree = trees["all"]
    arguments, results = program.jaxpr.invars, program.jaxpr.outvars
    num_free, num_kept = len(jax.tree.leaves((params, again))), len(split.kept)
    given, dy_vars = arguments[: num_free + num_kept], arguments[num_free + num_kept :]
    dparams_vars, dx_vars = results[: len(dparams_shapes)], results[len(dparams_shapes) :]

    first = _needed_for(program.jaxpr, dx_vars)
    rest = [eqn for eqn in program.jaxpr.eqns if eqn not in first]
    used = [v for eqn in rest for v in eqn.invars] + list(dparams_vars)
    left_vars = cheapest_to_keep(first, dy_vars, used, tracked=arguments[num_free : len(given)])

    run_inputs = subprogram(program, arguments, [*dx_vars, *left_vars], effects=True)
    run_weights = subprogram(program, [*given, *left_vars], dparams_vars)

    def inputs(
        params: Tree, again: Tree, kept: Sequence[jax.Array], dy: Tree
    ) -> tuple[Tree, list[jax.Array]]:
        values = run_inputs(*jax.tree.leaves((params, again)), *kept, *jax.tree.leaves(dy))
        return dx_tree.unflatten(values[: len(dx_vars)]), values[len(dx_vars) :]

    def weights(
        params: Tree, again: Tree, kept: Sequence[jax.Array], left: Sequence[jax.Array]
    ) -> Tree:
        return dparams_tree.unflatten(run_weights(*jax.tree.leaves((params, again)), *kept, *left))

    return SplitBackward([shape_of(v) for v in left_vars], inputs, weights)


def _needed_for(jaxpr: jex.Jaxpr, outputs: Sequence[Any]) -> list[jex.JaxprEqn]:
    """The equations that some outputs follow from, and those with effects."""
    needed = {v for v in outputs if isinstance(v, jex.Var)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, jex.Var))
    return eqns[::-1]
