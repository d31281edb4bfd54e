"""A flax.nnx model as pipeline stages, and its parameters in both forms.

The plain form is what Flax users know: the nested dict of `nnx.to_pure_dict(nnx.state(model))`.
The pipelined form is `Params`: the blocks stacked if they are alike and the stages divide them,
else a `PerStage` of the blocks of each stage, by their number in the model.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpipe.adapters.split import balanced_split, check_split_points, flops
from jpipe.pipeline import Params, PerStage, Recompute, Stages, repeat_block
from jpipe.pipeline.blocks import check_recompute

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class NnxPipeline:
    """A flax.nnx model cut into stem, blocks and head.

    Attributes:
        stages: the model as the pipeline runs it.
        num_blocks: how many blocks the body has.
        init: `(rngs) -> Params`, the parameters that the model's own constructor makes.
        names: the model's attributes for stem, body and head.
        split_points: the first block of each stage but the first; None if the blocks are stacked
            and any number of stages that divides them will do.
    """

    stages: Stages
    num_blocks: int
    init: Callable[[nnx.Rngs], Params]
    names: tuple[str, str, str]
    split_points: tuple[int, ...] | None = None

    def to_plain(self, params: Params) -> dict[str, Tree]:
        """Parameters in the model's own form, as NumPy arrays on the host.

        The result fits `nnx.replace_by_pure_dict(nnx.state(model), ...)`; nothing is rounded.
        """
        stem, body, head = self.names
        arrays = jax.tree.map(np.asarray, Params(*params))
        if isinstance(arrays.body, PerStage):
            blocks = {k: block for own in arrays.body for k, block in own.items()}
        else:
            blocks = {
                k: jax.tree.map(lambda a, k=k: a[k], arrays.body) for k in range(self.num_blocks)
            }
        return {stem: arrays.stem, body: blocks, head: arrays.head}

    def from_plain(self, plain: dict[str, Tree]) -> Params:
        """The inverse of `to_plain`.

        Raises:
            ValueError: if the number of blocks is another.
        """
        stem, body, head = self.names
        if len(plain[body]) != self.num_blocks:
            raise ValueError(
                f"the parameters have {len(plain[body])} blocks in {body!r}, the model has "
                f"{self.num_blocks}; load those of the same model"
            )
        blocks = [plain[body][k] for k in range(self.num_blocks)]
        return Params(plain[stem], _lay_out(blocks, self.split_points), plain[head])


def pipeline_from_nnx(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    *,
    stem: str,
    body: str,
    head: str,
    recompute: Recompute = "none",
    num_stages: int | None = None,
    split_points: Sequence[int] | None = None,
    inputs: Tree = None,
) -> NnxPipeline:
    """Cut a flax.nnx model into pipeline stages.

    The model must compute `head(body[-1](...body[0](stem(inputs))))`.

    If all blocks are alike and the stages divide them, the stages are alike as well, and nothing
    but the model is needed. Blocks that differ, in code, parameters or shapes, or that do not
    divide, need `num_stages` and either `split_points` or `inputs`, to balance the stages by the
    floating-point operations of their blocks.

    Args:
        make_model: `(rngs) -> model`; traced for shapes only.
        stem: the model's attribute that maps inputs to activations.
        body: the attribute that holds the blocks, an `nnx.List` of modules.
        head: the attribute that maps activations to outputs.
        recompute: what the backward computes again, see `jpipe.pipeline.repeat_block`.
        num_stages: P, if the stages may differ.
        split_points: the first block of each stage but the first.
        inputs: the inputs of one microbatch, or their shapes and dtypes.

    Raises:
        ValueError: if an attribute is missing, blocks differ without `num_stages`, the split
            points do not fit, other parts of the model hold parameters, or the model holds state
            other than parameters.
    """
    check_recompute(recompute)
    model = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    names = (stem, body, head)
    _check_parts(model, names)
    blocks = list(getattr(model, body))
    ends = [_caller(nnx.graphdef(getattr(model, name))) for name in (stem, head)]
    difference = _difference(blocks, body)
    alike = difference is None and (num_stages is None or len(blocks) % num_stages == 0)
    cuts: tuple[int, ...] | None = None
    if split_points is not None or not alike:
        if num_stages is None:
            why = difference or f"split_points={split_points}"
            raise ValueError(f"{why}; give num_stages, so that each stage gets its own")
        if split_points is None:
            cuts = _balance(model, names, num_stages, inputs)
        else:
            check_split_points(split_points, len(blocks), num_stages)
            cuts = tuple(split_points)

    def init(rngs: nnx.Rngs) -> Params:
        plain = nnx.to_pure_dict(nnx.state(make_model(rngs)))
        return Params(plain[stem], _lay_out(list(plain[body].values()), cuts), plain[head])

    callers = [_caller(nnx.graphdef(block)) for block in blocks]
    if cuts is None:
        run: Any = repeat_block(callers[0], recompute)
    else:
        run = PerStage(*(_run_blocks(callers, r, recompute) for r in _ranges(len(blocks), cuts)))
    return NnxPipeline(Stages(ends[0], run, ends[1]), len(blocks), init, names, cuts)


def _caller(graph: Any) -> Callable[[Tree, Tree], Tree]:
    def call(params: Tree, x: Tree) -> Tree:
        return nnx.merge(graph, nnx.State(params))(x)

    return call


def _run_blocks(
    callers: Sequence[Callable[[Tree, Tree], Tree]], which: range, recompute: Recompute
) -> Callable[[Tree, Tree], Tree]:
    """The function of a stage that runs blocks of its own."""

    def run(params: Tree, x: Tree) -> Tree:
        for k in which:
            call = jax.checkpoint(callers[k]) if recompute == "block" else callers[k]
            x = call(params[k], x)
        return x

    return jax.checkpoint(run, prevent_cse=False) if recompute == "stage" else run


def _ranges(num_blocks: int, cuts: Sequence[int]) -> list[range]:
    """The blocks of each stage."""
    return [range(a, b) for a, b in itertools.pairwise([0, *cuts, num_blocks])]


def _lay_out(blocks: list[Tree], cuts: Sequence[int] | None) -> Tree:
    """The parameters of blocks as those of a body."""
    if cuts is None:
        return jax.tree.map(lambda *a: jnp.stack(a), *blocks)
    return PerStage(*({k: blocks[k] for k in r} for r in _ranges(len(blocks), cuts)))


def _balance(
    model: nnx.Module, names: tuple[str, str, str], num_stages: int, inputs: Tree
) -> tuple[int, ...]:
    """Split points that balance the operations of the stages."""
    if inputs is None:
        raise ValueError(
            f"inputs=None: to balance {num_stages} stages give the inputs of one microbatch, or "
            "say where to cut with split_points"
        )
    stem, body, head = (getattr(model, name) for name in names)
    x, costs = inputs, []
    for module in (stem, *body, head):
        call, params = _caller(nnx.graphdef(module)), nnx.to_pure_dict(nnx.state(module))
        costs.append(flops(call, params, x))
        x = jax.eval_shape(call, params, x)
    return balanced_split(costs[1:-1], num_stages, first=costs[0], last=costs[-1])


def _check_parts(model: nnx.Module, names: tuple[str, str, str]) -> None:
    """Refuse a model that is not stem, blocks and head with parameters only."""
    for argument, name in zip(("stem", "body", "head"), names, strict=True):
        if not hasattr(model, name):
            raise ValueError(f"{argument}={name!r}: {type(model).__name__} has no such attribute")
    if not isinstance(getattr(model, names[1]), nnx.List | list | tuple):
        raise ValueError(f"body={names[1]!r} must be an nnx.List of blocks")
    if not len(getattr(model, names[1])):
        raise ValueError(f"body={names[1]!r} holds no blocks; a pipeline needs at least one")
    _check_shared(model, names)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        where = ".".join(map(str, path))
        if path[0] not in names:
            raise ValueError(
                f"{where} lies outside of {', '.join(names)}; move it into one of these, or it "
                "would take no part in the pipeline"
            )
        if not isinstance(variable, nnx.Param):
            raise ValueError(
                f"{where} is a {type(variable).__name__}; models with state other than nnx.Param "
                "are not supported yet"
            )


def _check_shared(model: nnx.Module, names: tuple[str, str, str]) -> None:
    """Refuse parts that share a variable: in the pipeline each would train its own copy."""
    stem, body, head = (getattr(model, name) for name in names)
    parts = {names[0]: stem, **{f"{names[1]}[{k}]": b for k, b in enumerate(body)}, names[2]: head}
    seen: dict[int, str] = {}
    for part, module in parts.items():
        for path, node in nnx.iter_graph(module):
            if not isinstance(node, nnx.Variable):
                continue
            here = ".".join([part, *map(str, path)])
            there = seen.setdefault(id(node), here)
            if there.partition(".")[0] != part:
                raise ValueError(
                    f"{here} and {there} are the same variable; parts that share variables (tied "
                    "weights, a block used twice) are not supported yet: give each its own"
                )


def _difference(blocks: list[nnx.Module], name: str) -> str | None:
    """How one block differs from the first, if one does."""
    first = blocks[0]

    def shapes(block: nnx.Module) -> Tree:
        return jax.tree.map(lambda a: (a.shape, str(a.dtype)), nnx.to_pure_dict(nnx.state(block)))

    for k, block in enumerate(blocks):
        if type(block) is not type(first) or nnx.graphdef(block) != nnx.graphdef(first):
            return (
                f"{name}[{k}], a {type(block).__name__}, is built otherwise than {name}[0], a "
                f"{type(first).__name__}"
            )
        if shapes(block) != shapes(first):
            return (
                f"the parameters of {name}[{k}] differ in shape or dtype from those of {name}[0]: "
                f"{shapes(block)} and {shapes(first)}"
            )
    return None
