"""Layers of a Flax model as pipeline stages, and its variables in both forms.

The plain form is what Flax users know: nested dicts by the names of their own model. The pipelined
form is `Params`: the blocks stacked if they are alike and the stages divide them, else a `PerStage`
of the blocks of each stage, by their number in the model; `Chunks` of these if a stage has several.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jpipe.adapters.layer import Layer, Path, flat, nested
from jpipe.adapters.split import balanced_split, check_split_points, flops
from jpipe.pipeline import Chunks, Params, PerStage, Recompute, Stages, repeat_block
from jpipe.pipeline.per_stage import chunks_of
from jpipe.pipeline.stages import Part
from jpipe.processes import to_host

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class FlaxPipeline:
    """A Flax model cut into stem, blocks and head.

    Attributes:
        stages: the model as the pipeline trains it.
        eval_stages: the model as it is evaluated: no dropout, running averages in batch norms.
        init: `(rngs) -> Params`, the parameters that the model's own initializers make; of a model
            with state `-> (Params, state)`. `rngs` is what the model itself is made with.
        num_blocks: how many blocks the body has.
        num_chunks: how many chunks of them each stage has.
        split_points: the first block of each stage but the first, or with several chunks of each
            virtual stage; None if the blocks are stacked and any number of stages that divides them
            will do.
        stage_flops: floating-point operations of the forward of each of these on one microbatch,
            where the split was chosen by them.
    """

    stages: Stages
    eval_stages: Stages
    init: Callable[[Any], Any]
    num_blocks: int
    num_chunks: int
    split_points: tuple[int, ...] | None
    stage_flops: tuple[float, ...] | None
    _layout: "Layout"

    def to_plain(self, params: Params, state: Params | None = None) -> Any:
        """Variables in the model's own form, as NumPy arrays on the host; nothing is rounded.

        Args:
            params: parameters, or anything of their structure.
            state: the state, if it should be part of the result.
        """
        kinds = [params] if state is None else [params, state]
        found: dict[Path, Any] = {}
        for kind in kinds:
            found |= self._layout.collect(to_host(Params(*kind)))
        return nested(found)

    def from_plain(self, plain: Any) -> Any:
        """The inverse of `to_plain`: what `init` returns, of given variables.

        Raises:
            ValueError: if they are those of another model; the first that differs is named.
        """
        return self._layout.distribute(flat(plain))


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where each variable of a model lies, in the plain and in the pipelined form.

    Attributes:
        stem: the first layer.
        blocks: the body's.
        head: the last.
        num_chunks: chunks of the blocks.
        cuts: the first block of each virtual stage but the first; None if the blocks are stacked.
        tied: paths of the head's parameters that are stored with the stem, and their paths there.
    """

    stem: Layer
    blocks: Sequence[Layer]
    head: Layer
    num_chunks: int
    cuts: tuple[int, ...] | None
    tied: dict[Path, Path]

    @property
    def has_state(self) -> bool:
        """Whether there is any."""
        return any(layer.state for layer in (self.stem, *self.blocks, self.head))

    def distribute(self, plain: dict[Path, Any]) -> Any:
        """Parameters, or parameters and state, from the plain form."""

        def take(layer: Layer, paths: Any) -> Tree:
            return nested({path: _find(plain, layer, path) for path in paths})

        self._check_known(plain)
        own_params = [path for path in self.head.params if path not in self.tied]
        params = Params(
            take(self.stem, self.stem.params),
            self._join([take(block, block.params) for block in self.blocks]),
            take(self.head, own_params),
        )
        if not self.has_state:
            return params
        state = Params(
            take(self.stem, self.stem.state),
            self._join([take(block, block.state) for block in self.blocks]),
            take(self.head, self.head.state),
        )
        return params, state

    def collect(self, tree: Params) -> dict[Path, Any]:
        """The plain form of parameters, state, or the like."""
        blocks: dict[int, Tree] = {}
        for chunk in chunks_of(tree.body):
            if isinstance(chunk, PerStage):
                blocks |= {k: block for own in chunk for k, block in own.items()}
                continue
            first, count = len(blocks), len(self.blocks) // self.num_chunks
            blocks |= {first + k: jax.tree.map(lambda a, k=k: a[k], chunk) for k in range(count)}
        parts = [(self.stem, tree.stem), (self.head, tree.head)]
        parts += [(self.blocks[k], blocks[k]) for k in blocks]
        return {
            layer.places[path]: leaf for layer, own in parts for path, leaf in flat(own).items()
        }

    def tie(self, params: Params) -> Params:
        """The head with what it shares with the stem."""
        stem, head = flat(params.stem), flat(params.head)
        shared = {path: stem[source] for path, source in self.tied.items()}
        return params._replace(head=nested(head | shared))

    def partition(self) -> Params | None:
        """How parameters lie over mesh axes but `stage`, if any layer says."""
        layers = (self.stem, *self.blocks, self.head)
        if not any(layer.partition for layer in layers):
            return None

        def specs(layer: Layer, leading: tuple[None, ...] = ()) -> Tree:
            return nested(
                {
                    path: PartitionSpec(*leading, *layer.partition.get(path, ()))
                    for path in layer.params
                    if layer is not self.head or path not in self.tied
                }
            )

        def piece(blocks: range) -> Tree:
            if self.cuts is None:
                return specs(self.blocks[0], (None,))
            return {k: specs(self.blocks[k]) for k in blocks}

        return Params(specs(self.stem), self._body(piece), specs(self.head))

    def stages(self, recompute: Recompute, *, train: bool) -> Stages:
        """The functions."""

        def part(layer: Layer) -> Part:
            return layer.train if train else layer.evaluate

        # What is alike runs by one function, stacked or not: linen draws random numbers by the name
        # of a module, which is no difference otherwise.
        kinds: list[Layer] = []
        for block in self.blocks:
            kinds += [] if any(k.difference(block) is None for k in kinds) else [block]
        calls = [
            part(next(k for k in kinds if k.difference(block) is None)) for block in self.blocks
        ]

        def piece(blocks: range) -> Part:
            if self.cuts is None:
                return repeat_block(calls[0], recompute, stateful=True)
            return _run_blocks(calls, blocks, recompute)

        return Stages(
            part(self.stem),
            self._body(piece),
            part(self.head),
            stateful=True,
            tie=self.tie if self.tied else None,
            partition=self.partition(),
        )

    def _body(self, piece: Callable[[range], Any]) -> Any:
        """A body, or something of its structure, of pieces that each have some of the blocks.

        A piece is a chunk if the blocks are stacked, and else a virtual stage.
        """
        total = len(self.blocks)
        if self.cuts is None:
            ends = [c * total // self.num_chunks for c in range(self.num_chunks + 1)]
        else:
            ends = [0, *self.cuts, total]
        pieces = [piece(range(a, b)) for a, b in itertools.pairwise(ends)]
        if self.cuts is not None:
            count = len(pieces) // self.num_chunks
            starts = range(0, len(pieces), count)
            pieces = [PerStage(*pieces[start : start + count]) for start in starts]
        return Chunks(*pieces) if self.num_chunks > 1 else pieces[0]

    def _join(self, blocks: list[Tree]) -> Tree:
        def piece(which: range) -> Tree:
            if self.cuts is None:
                return jax.tree.map(lambda *a: jnp.stack(a), *(blocks[k] for k in which))
            return {k: blocks[k] for k in which}

        return self._body(piece)

    def _check_known(self, plain: dict[Path, Any]) -> None:
        layers = (self.stem, *self.blocks, self.head)
        unknown = plain.keys() - {place for layer in layers for place in layer.places.values()}
        if unknown:
            raise ValueError(
                f"the model has no variable {_dotted(min(unknown, key=str))}; load variables of "
                "the same model"
            )


def assemble(
    stem: Layer,
    blocks: Sequence[Layer],
    head: Layer,
    init: Callable[[Any], dict[Path, Any]],
    *,
    recompute: Recompute,
    num_stages: int | None,
    num_chunks: int,
    split_points: Sequence[int] | None,
    inputs: Tree,
) -> FlaxPipeline:
    """Make a pipeline of layers.

    Args:
        stem: the first layer.
        blocks: the body's, at least one.
        head: the last.
        init: `(rngs) -> variables by path`, in the plain form.
        recompute: what the backward computes again.
        num_stages: P, if the stages may differ.
        num_chunks: V, chunks of the blocks on each stage.
        split_points: the first block of each virtual stage but the first.
        inputs: of one microbatch, or their shapes and dtypes.

    Raises:
        ValueError: if blocks differ without `num_stages`, the split points do not fit, or parts
            share variables in a way that a pipeline cannot.
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks={num_chunks} must be at least 1")
    if num_chunks > 1 and num_stages is not None and num_chunks * num_stages > len(blocks):
        raise ValueError(
            f"{len(blocks)} layers cannot be cut into {num_stages} stages of num_chunks="
            f"{num_chunks} chunks; use fewer of either"
        )
    tied = _find_tied(stem, blocks, head)
    difference = next(filter(None, map(blocks[0].difference, blocks)), None)
    alike = difference is None and len(blocks) % (num_chunks * (num_stages or 1)) == 0
    cuts: tuple[int, ...] | None = None
    stage_flops: tuple[float, ...] | None = None
    if split_points is not None or not alike:
        if num_stages is None:
            why = difference or (
                f"split_points={split_points}"
                if split_points is not None
                else f"num_chunks={num_chunks} does not divide {len(blocks)} blocks"
            )
            raise ValueError(f"{why}; give num_stages, so that each stage gets its own")
        if split_points is None:
            cuts, stage_flops = _balance(stem, blocks, head, num_stages * num_chunks, inputs)
        else:
            check_split_points(split_points, len(blocks), num_stages * num_chunks)
            cuts = tuple(split_points)
    layout = Layout(stem, blocks, head, num_chunks, cuts, tied)
    return FlaxPipeline(
        stages=layout.stages(recompute, train=True),
        eval_stages=layout.stages(recompute, train=False),
        init=lambda rngs: layout.distribute(init(rngs)),
        num_blocks=len(blocks),
        num_chunks=num_chunks,
        split_points=cuts,
        stage_flops=stage_flops,
        _layout=layout,
    )


def _run_blocks(calls: Sequence[Part], which: range, recompute: Recompute) -> Part:
    """The function of a stage that runs blocks of its own."""

    def run(params: Tree, state: Tree, x: Tree, key: Any) -> tuple[Tree, Tree]:
        updates = {}
        for k in which:
            call = jax.checkpoint(calls[k]) if recompute == "block" else calls[k]
            own_key = None if key is None else jax.random.fold_in(key, k)
            x, updates[k] = call(params[k], state[k] if state else {}, x, own_key)
        return x, updates if state else state

    return jax.checkpoint(run, prevent_cse=False) if recompute == "stage" else run


def _balance(
    stem: Layer, blocks: Sequence[Layer], head: Layer, num_stages: int, inputs: Tree
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Split points that balance the operations of the stages, and these operations."""
    if inputs is None:
        raise ValueError(
            f"inputs=None: to balance {num_stages} stages give the inputs of one microbatch, or "
            "say where to cut with split_points"
        )
    key = jax.eval_shape(lambda: jax.random.key(0))
    x, costs = inputs, []
    known: list[tuple[Layer, str, tuple[float, Tree]]] = []  # many layers are alike
    for layer in (stem, *blocks, head):
        shapes = str(jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a)), x))
        found = [
            result
            for other, other_shapes, result in known
            if shapes == other_shapes and other.difference(layer) is None
        ]
        if not found:
            arguments = (*layer.shapes, x, key)
            cost, y = flops(layer.train, *arguments), jax.eval_shape(layer.train, *arguments)[0]
            found = [(cost, y)]
            known.append((layer, shapes, found[0]))
        costs.append(found[0][0])
        x = found[0][1]
    cuts = balanced_split(costs[1:-1], num_stages, first=costs[0], last=costs[-1])
    ends = [0, *(1 + cut for cut in cuts), len(costs)]
    return cuts, tuple(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


def _find_tied(stem: Layer, blocks: Sequence[Layer], head: Layer) -> dict[Path, Path]:
    """Paths of the head's parameters that lie in the stem as well, and their paths there."""
    users: dict[Path, tuple[Layer, Path]] = {}
    tied: dict[Path, Path] = {}
    for layer in (stem, *blocks, head):
        for path, place in layer.places.items():
            first, source = users.setdefault(place, (layer, path))
            if first is layer:
                continue
            if first is stem and layer is head and path in head.params:
                tied[path] = source
                continue
            raise ValueError(
                f"{_dotted((first.name, *source))} and {_dotted((layer.name, *path))} are the same "
                "variable; only stem and head can share parameters (tied embeddings): give blocks "
                "their own"
            )
    return tied


def _find(plain: dict[Path, Any], layer: Layer, path: Path) -> Any:
    place = layer.places[path]
    wanted = layer.params[path] if path in layer.params else layer.state[path]
    if place not in plain:
        raise ValueError(f"the variables lack {_dotted(place)}; load those of the same model")
    found = plain[place]
    if jnp.shape(found) != wanted.shape:
        raise ValueError(
            f"{_dotted(place)} has shape {jnp.shape(found)}, the model's {wanted.shape}; load "
            "variables of the same model"
        )
    return found


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
