"""A flax.nnx model as pipeline stages."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jpipe.adapters.flax_pipeline import FlaxPipeline, assemble
from jpipe.adapters.layer import Layer, Path, flat, keep_changed, nested
from jpipe.pipeline import Recompute
from jpipe.pipeline.blocks import check_recompute
from jpipe.pipeline.stages import Part

Tree = Any


def pipeline_from_nnx(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    *,
    body: str,
    stem: str | None = None,
    head: str | None = None,
    wrt: Any = nnx.Param,
    recompute: Recompute = "none",
    num_stages: int | None = None,
    num_chunks: int = 1,
    split_points: Sequence[int] | None = None,
    inputs: Tree = None,
) -> FlaxPipeline:
    """Cut a flax.nnx model into pipeline stages.

    The model must compute `head(body[-1](...body[0](stem(inputs))))`. If it is a mere list of
    layers, its first is the stem and its last the head. What skips layers must travel with them:
    let a layer return a tuple, or any pytree, of all that later layers need.

    If all blocks are alike and the stages divide them, the stages are alike as well, and nothing
    but the model is needed. Blocks that differ, in code, parameters or shapes, or that do not
    divide, need `num_stages` and either `split_points` or `inputs`, to balance the stages by the
    floating-point operations of their blocks.

    The plain form of variables is that of `nnx.to_pure_dict(nnx.state(model))` without random keys,
    which are no part of a pipeline: each part draws from a key that depends on the step, the
    microbatch and the block.

    Args:
        make_model: `(rngs) -> model`; traced for shapes only.
        body: the model's attribute that holds the blocks, an `nnx.List` of modules.
        stem: the attribute that maps inputs to activations; None for the first of `body`.
        head: the attribute that maps activations to outputs; None for the last of `body`.
        wrt: which variables are trained, a filter as for `nnx.Optimizer`, whose paths begin at
            the model. All others are state, without gradients or optimizer state: running
            statistics, frozen parameters.
        recompute: what the backward computes again, see `jpipe.pipeline.repeat_block`.
        num_stages: P, if the stages may differ.
        num_chunks: V, how many chunks of the blocks each stage has, for the schedules `interleaved`
            and `zero-bubble-v`.
        split_points: the first block of each stage but the first; with several chunks, of each of
            the P V pieces but the first.
        inputs: the inputs of one microbatch, or their shapes and dtypes.

    Raises:
        ValueError: if an attribute is missing, blocks differ without `num_stages`, the split
            points do not fit, other parts of the model hold variables, or blocks share any.
    """
    check_recompute(recompute)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        with nnx.use_eager_sharding(False):  # annotations need no mesh yet
            return make_model(rngs)

    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    modules = _find_parts(model, stem, body, head)
    variables = {path: node for path, node in _variables(model).items() if not _is_random(node)}
    places = {id(node): path for path, node in variables.items()}
    _check_covered(places, modules)
    is_trained = nnx.filterlib.to_predicate(wrt)
    trained = {path for path, node in variables.items() if is_trained(path, node)}
    first, *blocks, last = (_layer(name, module, trained, places) for name, module in modules)

    def init(rngs: nnx.Rngs) -> dict[Path, Any]:
        state = nnx.state(make(rngs), nnx.Not(nnx.RngState))
        return flat(nnx.to_pure_dict(state))

    return assemble(
        first,
        blocks,
        last,
        init,
        recompute=recompute,
        num_stages=num_stages,
        num_chunks=num_chunks,
        split_points=split_points,
        inputs=inputs,
    )


def _layer(name: str, module: nnx.Module, trained: set[Path], places: dict[int, Path]) -> Layer:
    random, others = (flat(nnx.to_pure_dict(s)) for s in nnx.split(module, nnx.RngState, ...)[1:])
    variables = _variables(module)
    params = {p: leaf for p, leaf in others.items() if places[id(variables[p])] in trained}
    state = {p: leaf for p, leaf in others.items() if p not in params}
    evaluated = nnx.merge(*nnx.split(module))
    evaluated.eval()
    train, evaluate = (
        _part(name, nnx.graphdef(m), random, params, state) for m in (module, evaluated)
    )
    return Layer(
        name=name,
        kind=type(module).__name__,
        train=train,
        evaluate=evaluate,
        params=params,
        state=state,
        places={path: places[id(variables[path])] for path in (*params, *state)},
        signature=(type(module), nnx.graphdef(module)),
        partition={path: spec for path in params if (spec := _partition(variables[path]))},
    )


def _part(
    name: str,
    graph: Any,
    random: dict[Path, Any],
    trained: dict[Path, Any],
    known: dict[Path, Any],
) -> Part:
    """The function of a module; `random` are its random keys and how often each was used."""
    keys = [path for path, leaf in random.items() if _is_key(leaf)]

    def call(params: Tree, state: Tree, x: Tree, key: Any) -> tuple[Tree, dict[Path, Any]]:
        base = jax.random.key(0) if key is None else key
        drawn = {path: jnp.zeros(leaf.shape, jnp.uint32) for path, leaf in random.items()}
        drawn |= {path: jax.random.fold_in(base, j) for j, path in enumerate(keys)}
        module = nnx.merge(graph, *(nnx.State(tree) for tree in (nested(drawn), params, state)))
        y = module(x)
        if key is None and _has_drawn(module, drawn):
            raise ValueError(
                f"{name} draws random numbers, but there is no key; pass key=, to init_train_state "
                "or to the function that runs the model"
            )
        after = flat(nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState))))
        return y, {path: leaf for path, leaf in after.items() if path not in trained}

    return keep_changed(name, known, call)


def _variables(module: nnx.Module) -> dict[Path, nnx.Variable[Any]]:
    return {path: node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)}


def _has_drawn(module: nnx.Module, before: dict[Path, Any]) -> bool:
    after = flat(nnx.to_pure_dict(nnx.state(module, nnx.RngState)))
    return any(after[path] is not value for path, value in before.items())


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _is_random(variable: Any) -> bool:
    return isinstance(variable, nnx.RngState)


def _partition(variable: nnx.Variable[Any]) -> PartitionSpec | None:
    """The annotation of `nnx.with_partitioning`, if there is one."""
    names = variable.get_metadata().get("out_sharding")
    return PartitionSpec(*names) if names else None


def _find_parts(
    model: nnx.Module, stem: str | None, body: str, head: str | None
) -> list[tuple[str, nnx.Module]]:
    """Stem, blocks and head by name."""
    for argument, name in (("stem", stem), ("body", body), ("head", head)):
        if name is not None and not hasattr(model, name):
            raise ValueError(f"{argument}={name!r}: {type(model).__name__} has no such attribute")
    blocks = getattr(model, body)
    if not isinstance(blocks, nnx.List | list | tuple):
        raise ValueError(f"body={body!r} must be an nnx.List of blocks")
    parts = [(f"{body}[{k}]", block) for k, block in enumerate(blocks)]
    for name, block in parts:
        if not isinstance(block, nnx.Module):
            raise ValueError(
                f"{name} is a {type(block).__name__}, not an nnx.Module; wrap it in one"
            )
    if stem is not None:
        parts.insert(0, (stem, getattr(model, stem)))
    if head is not None:
        parts.append((head, getattr(model, head)))
    if len(parts) < 3:
        raise ValueError(
            f"body={body!r} holds {len(blocks)} layers; a pipeline needs at least one block "
            "between stem and head"
        )
    return parts


def _check_covered(places: dict[int, Path], parts: Sequence[tuple[str, nnx.Module]]) -> None:
    """Refuse variables outside of all parts."""
    covered = {id(node) for _, module in parts for _, node in nnx.iter_graph(module)}
    for variable, path in places.items():
        if variable not in covered:
            names = ", ".join(dict.fromkeys(name.partition("[")[0] for name, _ in parts))
            raise ValueError(
                f"{'.'.join(map(str, path))} lies outside of {names}; move it into one of these, "
                "or it would take no part in the pipeline"
            )
