"""A flax.linen model as pipeline stages."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen
from flax.core import meta
from jax.extend import core as jex
from jax.sharding import PartitionSpec

from jpipe.adapters.flax_pipeline import FlaxPipeline, assemble
from jpipe.adapters.layer import Layer, Path, flat, keep_changed, nested
from jpipe.pipeline import Recompute
from jpipe.pipeline.blocks import check_recompute
from jpipe.pipeline.stages import Part

Tree = Any

_PARAMS = "params"


def pipeline_from_linen(
    model: linen.Module,
    inputs: Tree,
    *,
    body: str,
    stem: str | None = None,
    head: str | None = None,
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    rngs: Sequence[str] = ("dropout",),
    trainable: Callable[[Path], bool] = lambda path: True,
    recompute: Recompute = "none",
    num_stages: int | None = None,
    num_chunks: int = 1,
    split_points: Sequence[int] | None = None,
) -> FlaxPipeline:
    """Cut a flax.linen model into pipeline stages.

    The model must have its parts by name, as one that is written with `setup` or `nn.Sequential`
    has, and compute `head(body[-1](...body[0](stem(inputs))))`. If it is a mere list of layers, its
    first is the stem and its last the head. What skips layers must travel with them: let a layer
    return a tuple, or any pytree, of all that later layers need. Stem and head may share
    parameters, such as an embedding that `head`, a method, uses by `attend`.

    The plain form of variables is that of `model.init`: a dict of collections.

    Args:
        model: the module, not bound.
        inputs: the inputs of one microbatch, or their shapes and dtypes.
        body: the attribute that holds the blocks, a list of modules.
        stem: the attribute or method that maps inputs to activations; None for the first of `body`.
        head: the attribute or method that maps activations to outputs; None for the last of `body`.
        train: keyword arguments for the calls of all parts that take them, in training, such as
            `{"train": True}`.
        evaluate: the same in evaluation.
        rngs: names of the random number streams that calls draw from.
        trainable: whether the parameter of a path, such as `("embedding", "kernel")`, is trained.
            The others are state, without gradients or optimizer state.
        recompute: what the backward computes again, see `jpipe.pipeline.repeat_block`.
        num_stages: P, if the stages may differ.
        num_chunks: V, how many chunks of the blocks each stage has, for the schedules `interleaved`
            and `zero-bubble-v`.
        split_points: the first block of each stage but the first; with several chunks, of each of
            the P V pieces but the first.

    Raises:
        ValueError: if an attribute is missing, blocks differ without `num_stages`, the split
            points do not fit, a variable is used by no part, or blocks share any.
    """
    check_recompute(recompute)
    boxed = jax.eval_shape(
        lambda x: model.init(_keys(rngs, jax.random.key(0)), x, **_own(model, train)), inputs
    )
    variables = flat(meta.unbox(boxed))
    specs = {
        path: spec
        for path, spec in flat(linen.get_partition_spec(boxed)).items()
        if isinstance(spec, PartitionSpec) and any(spec)
    }
    calls = _find_parts(model, nested(variables), stem, body, head)
    layers, x = [], inputs
    for k, (name, get) in enumerate(calls):
        in_body = 0 < k < len(calls) - 1
        traced = _Traced(name, model, get, variables, rngs, train, evaluate, x)
        layers.append(traced.layer(in_body, trainable, specs))
        x = traced.outputs
    _check_covered(variables, layers)

    def init(key: Any) -> dict[Path, Any]:
        keys = key if isinstance(key, Mapping) else _keys(rngs, key)
        example = jax.tree.map(
            lambda a: jnp.zeros(jnp.shape(a), jax.dtypes.canonicalize_dtype(a.dtype)), inputs
        )
        return flat(meta.unbox(model.init(keys, example, **_own(model, train))))

    return assemble(
        layers[0],
        layers[1:-1],
        layers[-1],
        init,
        recompute=recompute,
        num_stages=num_stages,
        num_chunks=num_chunks,
        split_points=split_points,
        inputs=inputs,
    )


class _Traced:
    """One part of the model, traced with all variables to see which it uses."""

    def __init__(
        self,
        name: str,
        model: linen.Module,
        get: Callable[[Any], Any],
        variables: dict[Path, Any],
        rngs: Sequence[str],
        train: Mapping[str, Any] | None,
        evaluate: Mapping[str, Any] | None,
        x: Tree,
    ) -> None:
        self._name, self._variables, self._rngs = name, variables, rngs
        self._model, self._get = model, get
        target = get(model.bind(nested(variables)))
        self._target = target
        self._train, self._evaluate = train or {}, evaluate or {}

        def run(values: dict[Path, Any], x: Tree, key: jax.Array) -> tuple[Tree, Tree]:
            y, after = self.call(self._train, values, x, key)
            changed = {p: v for p, v in after.items() if v is not values[p]}
            return y, nested(changed)

        key = jax.eval_shape(lambda: jax.random.key(0))
        jaxpr, (self.outputs, changed) = jax.make_jaxpr(run, return_shape=True)(variables, x, key)
        used = {v for e in jaxpr.jaxpr.eqns for v in e.invars if isinstance(v, jex.Var)}
        used |= {v for v in jaxpr.jaxpr.outvars if isinstance(v, jex.Var)}
        paths: list[Path] = sorted(variables)  # the order in which JAX flattens dicts
        invars = jaxpr.jaxpr.invars[: len(paths)]
        moved = set(flat(changed))
        self.used = [p for p, v in zip(paths, invars, strict=True) if v in used or p in moved]

    def call(
        self, arguments: Mapping[str, Any], values: dict[Path, Any], x: Tree, key: Any
    ) -> tuple[Tree, dict[Path, Any]]:
        """What the part makes, and the state among its variables afterwards."""

        def method(module: Any, x: Tree) -> Tree:
            target = self._get(module)
            return target(x, **_accepted(target, arguments))

        collections = sorted({path[0] for path in values} - {_PARAMS})
        keys = {} if key is None else _keys(self._rngs, key)
        # What `setup` itself declares is looked up for every part, used or not.
        unused = {
            path: jnp.zeros(leaf.shape, leaf.dtype)
            for path, leaf in self._variables.items()
            if len(path) == 2 and path not in values
        }
        try:
            result: Any = self._model.apply(
                nested(unused | values), x, rngs=keys, mutable=collections, method=method
            )
        except errors.InvalidRngError as error:
            if key is not None:
                raise
            raise ValueError(
                f"{self._name} draws random numbers, but there is no key; pass key=, to "
                "init_train_state or to the function that runs the model"
            ) from error
        y, after = result
        return y, {
            path: leaf
            for path, leaf in flat(after).items()
            if path[0] != _PARAMS and path not in unused
        }

    def layer(
        self,
        in_body: bool,
        trainable: Callable[[Path], bool],
        specs: Mapping[Path, PartitionSpec],
    ) -> Layer:
        """The part with the variables that it uses; those of a block go by their names in it."""
        name = self._name
        owners = {path[1] for path in self.used}
        if in_body and len(owners) > 1:
            raise ValueError(
                f"{name} uses variables of {' and '.join(sorted(owners))}; blocks must have their "
                "own: only stem and head can share parameters"
            )
        places = {(path[0], *path[2:]) if in_body else path: path for path in self.used}
        shapes = {path: self._variables[place] for path, place in places.items()}

        def is_param(path: Path) -> bool:
            return path[0] == _PARAMS and trainable(places[path][1:])

        def part(arguments: Mapping[str, Any]) -> Part:
            def call(params: Tree, state: Tree, x: Tree, key: Any) -> tuple[Tree, dict[Path, Any]]:
                own = flat(params) | flat(state)
                y, after = self.call(arguments, {places[p]: a for p, a in own.items()}, x, key)
                back = {place: path for path, place in places.items()}
                return y, {back.get(place, place): leaf for place, leaf in after.items()}

            return keep_changed(name, state, call)

        params = {path: leaf for path, leaf in shapes.items() if is_param(path)}
        state = {path: leaf for path, leaf in shapes.items() if not is_param(path)}
        return Layer(
            name=name,
            kind=type(self._target).__name__,
            train=part(self._train),
            evaluate=part(self._evaluate),
            params=params,
            state=state,
            places=places,
            signature=_signature(self._target),
            partition={path: specs[place] for path, place in places.items() if place in specs},
        )


def _signature(target: Any) -> Any:
    """Equal for what computes the same of variables of its own."""
    return target.clone(parent=None, name=None) if isinstance(target, linen.Module) else target


def _keys(names: Sequence[str], key: jax.Array) -> dict[str, jax.Array]:
    """A key for each stream, and that of the parameters."""
    return {name: jax.random.fold_in(key, j) for j, name in enumerate((_PARAMS, *names))}


def _own(model: linen.Module, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of the whole model's call."""
    return _accepted(model, arguments or {})


def _accepted(target: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a call takes."""
    function = target.__call__ if isinstance(target, linen.Module) else target
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def _find_parts(
    model: linen.Module, variables: Tree, stem: str | None, body: str, head: str | None
) -> list[tuple[str, Callable[[Any], Any]]]:
    """Stem, blocks and head by name, each as a function of the bound model."""
    bound: Any = model.bind(variables)
    for argument, name in (("stem", stem), ("body", body), ("head", head)):
        if name is not None and not hasattr(bound, name):
            raise ValueError(f"{argument}={name!r}: {type(model).__name__} has no such attribute")
    blocks = getattr(bound, body)
    if not isinstance(blocks, list | tuple):
        raise ValueError(f"body={body!r} must be a list of modules")

    def attribute(name: str) -> Callable[[Any], Any]:
        return lambda module: getattr(module, name)

    def item(k: int) -> Callable[[Any], Any]:
        return lambda module: getattr(module, body)[k]

    parts = [(f"{body}[{k}]", item(k)) for k in range(len(blocks))]
    if stem is not None:
        parts.insert(0, (stem, attribute(stem)))
    if head is not None:
        parts.append((head, attribute(head)))
    if len(parts) < 3:
        raise ValueError(
            f"body={body!r} holds {len(blocks)} layers; a pipeline needs at least one block "
            "between stem and head"
        )
    return parts


def _check_covered(variables: dict[Path, Any], layers: Sequence[Layer]) -> None:
    covered = {place for layer in layers for place in layer.places.values()}
    for path in variables:
        if path not in covered:
            names = ", ".join(dict.fromkeys(layer.name.partition("[")[0] for layer in layers))
            raise ValueError(
                f"{'.'.join(map(str, path))} is used by none of {names}; let one of these use it, "
                "or it would take no part in the pipeline"
            )
