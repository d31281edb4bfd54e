"""A flax.nnx model as pipeline stages, and its parameters in both forms.

The plain form is what Flax users know: the nested dict of `nnx.to_pure_dict(nnx.state(model))`.
The pipelined form is `Params`, in which the blocks are stacked.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpipe.pipeline import Params, Recompute, Stages, repeat_block

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class NnxPipeline:
    """A flax.nnx model cut into stem, blocks and head.

    Attributes:
        stages: the model as the pipeline runs it.
        num_blocks: how many blocks the body has.
        init: `(rngs) -> Params`, the parameters that the model's own constructor makes. Jit it
            with `out_shardings` and no device ever holds them all.
        names: the model's attributes for stem, body and head.
    """

    stages: Stages
    num_blocks: int
    init: Callable[[nnx.Rngs], Params]
    names: tuple[str, str, str]

    def to_plain(self, params: Params) -> dict[str, Tree]:
        """Parameters in the model's own form, as NumPy arrays on the host.

        The result fits `nnx.replace_by_pure_dict(nnx.state(model), ...)`; nothing is rounded.
        """
        stem, body, head = self.names
        arrays = jax.tree.map(np.asarray, Params(*params))
        blocks = {k: jax.tree.map(lambda a, k=k: a[k], arrays.body) for k in range(self.num_blocks)}
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
        return Params(plain[stem], jax.tree.map(lambda *a: np.stack(a), *blocks), plain[head])


def pipeline_from_nnx(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    *,
    stem: str,
    body: str,
    head: str,
    recompute: Recompute = "none",
) -> NnxPipeline:
    """Cut a flax.nnx model into pipeline stages.

    The model must compute `head(body[-1](...body[0](stem(inputs))))`.

    Args:
        make_model: `(rngs) -> model`; traced for shapes only.
        stem: the model's attribute that maps inputs to activations.
        body: the attribute that holds the blocks, an `nnx.List` of equal modules.
        head: the attribute that maps activations to outputs.
        recompute: what the backward computes again, see `jpipe.pipeline.repeat_block`.

    Raises:
        ValueError: if an attribute is missing, the blocks differ, other parts of the model hold
            parameters, or the model holds state other than parameters.
    """
    model = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    names = (stem, body, head)
    _check_parts(model, names)
    blocks = list(getattr(model, body))
    stem_graph, head_graph = nnx.graphdef(getattr(model, stem)), nnx.graphdef(getattr(model, head))
    block_graph = _common_graph(blocks, body)

    def caller(graph: Any) -> Callable[[Tree, Tree], Tree]:
        def call(params: Tree, x: Tree) -> Tree:
            return nnx.merge(graph, nnx.State(params))(x)

        return call

    def init(rngs: nnx.Rngs) -> Params:
        plain = nnx.to_pure_dict(nnx.state(make_model(rngs)))
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *plain[body].values())
        return Params(plain[stem], stacked, plain[head])

    stages = Stages(
        stem=caller(stem_graph),
        body=repeat_block(caller(block_graph), recompute),
        head=caller(head_graph),
    )
    return NnxPipeline(stages, len(blocks), init, names)


def _check_parts(model: nnx.Module, names: tuple[str, str, str]) -> None:
    """Refuse a model that is not stem, blocks and head with parameters only."""
    for argument, name in zip(("stem", "body", "head"), names, strict=True):
        if not hasattr(model, name):
            raise ValueError(f"{argument}={name!r}: {type(model).__name__} has no such attribute")
    if not isinstance(getattr(model, names[1]), nnx.List | list | tuple):
        raise ValueError(f"body={names[1]!r} must be an nnx.List of blocks")
    if not len(getattr(model, names[1])):
        raise ValueError(f"body={names[1]!r} holds no blocks; a pipeline needs at least one")
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


def _common_graph(blocks: list[nnx.Module], name: str) -> Any:
    """The graph of the blocks, which must be the same module with parameters of the same shapes."""
    first = blocks[0]

    def shapes(block: nnx.Module) -> Tree:
        return jax.tree.map(lambda a: (a.shape, str(a.dtype)), nnx.to_pure_dict(nnx.state(block)))

    for k, block in enumerate(blocks):
        if type(block) is not type(first) or nnx.graphdef(block) != nnx.graphdef(first):
            raise ValueError(
                f"{name}[{k}] is another {type(block).__name__} than {name}[0], a "
                f"{type(first).__name__}; all blocks of the body must be built alike"
            )
        if shapes(block) != shapes(first):
            raise ValueError(
                f"the parameters of {name}[{k}] differ in shape or dtype from those of {name}[0]: "
                f"{shapes(block)} and {shapes(first)}; all blocks of the body must be built alike"
            )
    return nnx.graphdef(first)
