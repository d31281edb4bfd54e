"""Split a function's gradient into a forward and a backward that may run far apart.

Between the two lies what the backward needs of the forward: the residuals. `jax.vjp` names them,
and the user decides which there are with `jax.checkpoint`. Of these we keep fewer bytes than
`jax.vjp` would:

- what depends on the parameters alone (cast weights, products of weights) is computed again;
- what follows from other values by continuous elementwise operations or changes of shape is
  computed again, where XLA fuses it into its use. Which values to keep is a minimum cut of the
  program.

The second idea is that of the min-cut rematerialization in PyTorch's AOTAutograd (He and Yu,
"Min-cut optimal(*) recomputation", 2022). Decisions are never made twice: XLA may round the same
expression otherwise in another program, and a comparison that was true in the forward could be
false in the backward. So comparisons and roundings count as results to keep.

Beside parameters and input a function may take what has no gradient. What is there again for the
backward, such as a random key or a frozen weight, is free: what follows from it alone is computed
again, so that dropout masks are never kept. What will have changed by then is kept like the input.
A loop counts as a whole: weights cast inside of a `jax.lax.scan` are kept with what depends on x.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jpipe.pipeline.mincut import minimum_vertex_cut

Tree = Any

_ELEMENTWISE = """
abs add add_any and clamp convert_element_type copy cos div exp exp2 expm1 imag integer_pow log
log1p logistic max min mul neg not or pow real reduce_precision rsqrt select_n sin sqrt square
stop_gradient sub tanh xor
"""
_SHAPE = "broadcast_in_dim expand_dims iota reshape slice squeeze transpose"
CHEAP = frozenset(_ELEMENTWISE.split() + _SHAPE.split())
"""Primitives that may be computed again: no reduction or contraction, and nothing that jumps."""


@dataclasses.dataclass(frozen=True, eq=False)
class SplitGradient:
    """A function of parameters and an input, cut into forward and backward.

    Attributes:
        kept: shapes and dtypes of what lies between the two, the contents of the stash.
        forward: `(params, again, x, once) -> (y, aux, kept values)`.
        backward: `(params, again, kept values, gradient of y) -> (gradients of params and of x)`.
    """

    kept: list[jax.ShapeDtypeStruct]
    forward: Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree, list[jax.Array]]]
    backward: Callable[[Tree, Tree, Sequence[jax.Array], Tree], tuple[Tree, Tree]]


def split_gradient(
    function: Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]],
    params: Tree,
    again: Tree,
    x: Tree,
    once: Tree,
) -> SplitGradient:
    """Split the gradient of a function for arguments of the given shapes and dtypes.

    Args:
        function: `(params, again, x, once) -> (y, aux)`; y is differentiable in parameters and x.
        params: its parameters.
        again: what the backward has as well as the forward, without gradient.
        x: its input.
        once: what only the forward has, without gradient.
    """
    trees: dict[str, Any] = {}

    def linearize(params: Tree, again: Tree, x: Tree, once: Tree) -> list[list[Any]]:
        y, pullback, aux = jax.vjp(
            lambda params, x: function(params, again, x, once), params, x, has_aux=True
        )
        parts = {"y": y, "aux": aux, "pullback": pullback}
        leaves, trees["all"] = zip(*map(jax.tree.flatten, parts.values()), strict=True)
        return list(leaves)

    program, (y_shapes, aux_shapes, _) = jax.make_jaxpr(linearize, return_shape=True)(
        params, again, x, once
    )
    y_tree, aux_tree, pullback_tree = trees["all"]
    program = inline(program)
    inputs, outputs = program.jaxpr.invars, program.jaxpr.outvars
    num_free, num_y = len(jax.tree.leaves((params, again))), len(y_shapes)
    num_results = num_y + len(aux_shapes)
    residual_vars = outputs[num_results:]
    kept_vars = cheapest_to_keep(program.jaxpr.eqns, inputs[num_free:], residual_vars)

    run_forward = subprogram(program, inputs, [*outputs[:num_results], *kept_vars], effects=True)
    run_rest = subprogram(program, [*inputs[:num_free], *kept_vars], residual_vars)

    def forward(
        params: Tree, again: Tree, x: Tree, once: Tree
    ) -> tuple[Tree, Tree, list[jax.Array]]:
        values = run_forward(*jax.tree.leaves((params, again, x, once)))
        y, aux = y_tree.unflatten(values[:num_y]), aux_tree.unflatten(values[num_y:num_results])
        return y, aux, values[num_results:]

    def backward(
        params: Tree, again: Tree, kept: Sequence[jax.Array], dy: Tree
    ) -> tuple[Tree, Tree]:
        residuals = run_rest(*jax.tree.leaves((params, again)), *kept)
        dparams, dx = pullback_tree.unflatten(residuals)(dy)
        return dparams, dx

    return SplitGradient([shape_of(v) for v in kept_vars], forward, backward)


def cheapest_to_keep(
    eqns: Sequence[jex.JaxprEqn],
    x_vars: Sequence[jex.Var],
    residuals: Sequence[jex.Var | jex.Literal],
    tracked: Sequence[jex.Var] = (),
) -> list[jex.Var]:
    """The variables of fewest bytes from which every residual follows cheaply.

    Args:
        eqns: a program.
        x_vars: inputs that will be gone, unless they are kept.
        residuals: what is needed.
        tracked: inputs that stay, but what is computed of them is worth keeping. Of all other
            inputs everything may be computed again.
    """
    index: dict[jex.Var, int] = {v: k for k, v in enumerate([*x_vars, *tracked])}
    sources, edges = list(range(len(x_vars))), []
    for eqn in eqns:
        known = [v for v in eqn.invars if isinstance(v, jex.Var) and v in index]
        if not known:
            continue
        for out in eqn.outvars:
            index[out] = len(index)
            if _is_cheap(eqn):
                edges += [(index[v], index[out]) for v in known]
            else:
                sources.append(index[out])
    targets = {index[v] for v in residuals if isinstance(v, jex.Var) and v in index}
    cost = [shape_of(v).size * shape_of(v).dtype.itemsize for v in index]
    variables = list(index)
    return [variables[k] for k in minimum_vertex_cut(cost, edges, sources, targets)]


def _is_cheap(eqn: jex.JaxprEqn) -> bool:
    """Whether to compute an equation again; a conversion to integers decides, like a rounding."""
    if eqn.primitive.name == "convert_element_type":
        before, after = (jnp.issubdtype(shape_of(v).dtype, jnp.inexact) for v in _ends(eqn))
        return after or not before
    return eqn.primitive.name in CHEAP


def _ends(eqn: jex.JaxprEqn) -> tuple[Any, Any]:
    return eqn.invars[0], eqn.outvars[0]


def shape_of(variable: jex.Var | jex.Literal) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a variable."""
    aval: Any = variable.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def subprogram(
    program: jex.ClosedJaxpr,
    inputs: Sequence[jex.Var],
    outputs: Sequence[jex.Var | jex.Literal],
    *,
    effects: bool = False,
) -> Callable[..., list[Any]]:
    """The part of a program that leads from some variables to others, with its effects or not."""
    given = set(inputs) | set(program.jaxpr.constvars)
    needed = {v for v in outputs if isinstance(v, jex.Var)} - given
    eqns = []
    for eqn in reversed(program.jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars) and not (effects and eqn.effects):
            continue
        eqns.append(eqn)
        needed.difference_update(eqn.outvars)
        needed.update(v for v in eqn.invars if isinstance(v, jex.Var) and v not in given)
    assert not needed, f"not derivable from the inputs: {needed}"
    jaxpr = program.jaxpr.replace(invars=list(inputs), outvars=list(outputs), eqns=eqns[::-1])
    run: Callable[..., list[Any]] = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, program.consts))
    return run


def inline(program: jex.ClosedJaxpr, calls: Sequence[str] = ("jit",)) -> jex.ClosedJaxpr:
    """The same program with the bodies of its calls in place of the calls.

    Without this a call whose outputs depend partly on x would hide which of them do.

    Args:
        program: the program.
        calls: names of the primitives that count as calls.
    """

    def evaluate(program: jex.ClosedJaxpr, *arguments: Any) -> list[Any]:
        value = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        value |= dict(zip(program.jaxpr.invars, arguments, strict=True))

        def read(v: jex.Var | jex.Literal) -> Any:
            return value[v] if isinstance(v, jex.Var) else v.val

        for eqn in program.jaxpr.eqns:
            if eqn.primitive.name in calls:
                body = eqn.params["jaxpr"]
                if isinstance(body, jex.Jaxpr):
                    body = jex.ClosedJaxpr(body, ())
                results = evaluate(body, *map(read, eqn.invars))
            else:
                operands = [v for v in eqn.invars if isinstance(v, jex.Var)]
                alone = program.jaxpr.replace(
                    constvars=[], invars=operands, outvars=eqn.outvars, eqns=[eqn]
                )
                results = jax.core.eval_jaxpr(alone, [], *map(read, operands))
            value |= dict(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in program.jaxpr.outvars]

    return jax.make_jaxpr(lambda *arguments: evaluate(program, *arguments))(*program.in_avals)
