"""A body whose stages differ, as one program that all stages run.

A switch on the stage picks the stage's own function. The gradient is taken inside of each branch,
since that of a whole switch would keep the residuals of every branch. What differs between stages
(parameters, state, activations, what is kept) lies in vectors of one size, see `packing`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jpipe.pipeline.divide import divide
from jpipe.pipeline.packing import Packing
from jpipe.pipeline.residuals import SplitGradient, split_gradient
from jpipe.pipeline.stages import Part, Tree
from jpipe.pipeline.state import State, Variables
from jpipe.pipeline.weight_gradient import SplitBackward, split_backward
from jpipe.schedule.table import nth_of_chunk

Key = jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class UnevenBody:
    """The pieces of a body, by virtual stage.

    Attributes:
        functions: of each piece.
        axis: the mesh axis of the stages; must be manual.
        shapes: shapes and dtypes of each piece's variables.
        between: shapes and dtypes of what enters each piece, and of what leaves the last.
        key: the body's key in any microbatch, or None.
        rows: examples of a microbatch, where XLA divides them over devices, see `packing`.
        folded: whether every other chunk goes back over the stages, see `Schedule`.
    """

    functions: Sequence[Part]
    axis: str
    shapes: Sequence[Variables]
    between: Sequence[Tree]
    key: Key
    rows: int | None
    folded: bool

    @classmethod
    def of(
        cls,
        bodies: Sequence[Any],
        axis: str,
        shapes: Variables,
        x: Tree,
        key: Key,
        rows: int | None,
        *,
        folded: bool,
    ) -> "UnevenBody":
        """From the chunks of a body, the shapes of its variables and of what enters it."""
        functions = [function for chunk in bodies for function in chunk]
        of_each = [
            Variables(*kinds) for chunk in shapes.chunks() for kinds in zip(*chunk, strict=True)
        ]
        between = [x]
        for function, own in zip(functions, of_each, strict=True):
            state = State(own.moving, own.constant).whole()
            between.append(jax.eval_shape(function, own.params, state, between[-1], key)[0])
        return cls(functions, axis, of_each, between, key, rows, folded)

    def run(self, chunk: int, own: Variables, payload: Tree, key: Key) -> Tree:
        """The stage's piece of a chunk, without gradient."""

        def of_piece(v: int) -> Callable[[Variables, Tree, Key], Tree]:
            def run(own: Variables, payload: Tree, key: Key) -> Tree:
                variables = self._unpack(v, own)
                x = self.activations.unpack(v, payload)
                again = variables.constant, key
                y, _ = self._function(v)(variables.params, again, x, variables.moving)
                return self.activations.pack(v + 1, y)

            return run

        return self._by_stage(of_piece, chunk)(own, payload, key)

    def split(self, chunk: int) -> SplitGradient:
        """The gradient of a chunk, cut into forward and backward."""

        def forward_of(v: int) -> Callable[..., tuple[Tree, Tree, list[jax.Array]]]:
            def forward(
                params: Tree, again: tuple[Tree, Key], payload: Tree, moving: Tree
            ) -> tuple[Tree, Tree, list[jax.Array]]:
                own = self._unpack(v, Variables(params, again[0], moving))
                x = self.activations.unpack(v, payload)
                y, updates, kept = self._splits[v].forward(
                    own.params, (own.constant, again[1]), x, own.moving
                )
                moved = self._variables(v).moving.pack(self._nth(v), updates)
                return self.activations.pack(v + 1, y), moved, self._kept.pack_list(v, kept)

            return forward

        def backward_of(v: int) -> Callable[..., tuple[Tree, Tree]]:
            def backward(
                params: Tree, again: tuple[Tree, Key], kept: list[jax.Array], dy: Tree
            ) -> tuple[Tree, Tree]:
                dparams, dx = self._splits[v].backward(
                    *self._given(v, params, again, kept), self.activations.unpack(v + 1, dy)
                )
                return self._pack_grads(v, dparams), self.activations.pack(v, dx)

            return backward

        return SplitGradient(
            kept=self._kept.shape_list,
            forward=self._by_stage(forward_of, chunk),
            backward=self._by_stage(backward_of, chunk),
        )

    def split_backward(self, chunk: int) -> SplitBackward:
        """The backward of a chunk, cut into input and weight gradient."""

        def inputs_of(v: int) -> Callable[..., tuple[Tree, list[jax.Array]]]:
            def inputs(
                params: Tree, again: tuple[Tree, Key], kept: list[jax.Array], dy: Tree
            ) -> tuple[Tree, list[jax.Array]]:
                dx, left = self._halves[v].inputs(
                    *self._given(v, params, again, kept), self.activations.unpack(v + 1, dy)
                )
                return self.activations.pack(v, dx), self._left.pack_list(v, left)

            return inputs

        def weights_of(v: int) -> Callable[..., Tree]:
            def weights(
                params: Tree,
                again: tuple[Tree, Key],
                kept: list[jax.Array],
                left: list[jax.Array],
            ) -> Tree:
                dparams = self._halves[v].weights(
                    *self._given(v, params, again, kept), self._left.unpack_list(v, left)
                )
                return self._pack_grads(v, dparams)

            return weights

        return SplitBackward(
            left=self._left.shape_list,
            inputs=self._by_stage(inputs_of, chunk),
            weights=self._by_stage(weights_of, chunk),
        )

    @functools.cached_property
    def activations(self) -> Packing:
        """How what travels is packed."""
        return Packing(self.between, self.rows)

    @functools.cached_property
    def _num_stages(self) -> int:
        return int(jax.lax.axis_size(self.axis))

    @functools.cached_property
    def _packings(self) -> list[Variables]:
        """How the variables of each chunk are packed."""
        starts = range(0, len(self.functions), self._num_stages)
        chunks = [self.shapes[v : v + self._num_stages] for v in starts]
        return [Variables(*map(Packing, zip(*chunk, strict=True))) for chunk in chunks]

    @functools.cached_property
    def _splits(self) -> list[SplitGradient]:
        return [
            split_gradient(
                self._function(v), own.params, (own.constant, self.key), self.between[v], own.moving
            )
            for v, own in enumerate(self.shapes)
        ]

    @functools.cached_property
    def _kept(self) -> Packing:
        return Packing([split.kept for split in self._splits], self.rows)

    @functools.cached_property
    def _halves(self) -> list[SplitBackward]:
        return [
            split_backward(
                self._splits[v], own.params, (own.constant, self.key), self.between[v + 1]
            )
            for v, own in enumerate(self.shapes)
        ]

    @functools.cached_property
    def _left(self) -> Packing:
        return Packing([half.left for half in self._halves], self.rows)

    def _by_stage(
        self, of_piece: Callable[[int], Callable[..., Any]], chunk: int
    ) -> Callable[..., Any]:
        """The function that runs that of the stage's own piece of a chunk."""
        count = self._num_stages
        pieces = [nth_of_chunk(s, chunk, count, folded=self.folded) for s in range(count)]
        branches = [of_piece(chunk * count + nth) for nth in pieces]
        return lambda *operands: jax.lax.switch(jax.lax.axis_index(self.axis), branches, *operands)

    def _function(self, v: int) -> Any:
        """A piece in the form of which `split_gradient` takes the gradient."""

        def run(params: Tree, again: tuple[Tree, Key], x: Tree, moving: Tree) -> Any:
            constant, key = again
            state = State(moving, constant).whole()
            y, updates = self.functions[v](params, state, divide(x, self.rows), key)
            return divide(y, self.rows), updates

        return run

    def _nth(self, v: int) -> int:
        """Which piece of its chunk a virtual stage is."""
        return v % self._num_stages

    def _variables(self, v: int) -> Variables:
        return self._packings[v // self._num_stages]

    def _unpack(self, v: int, packed: Variables) -> Variables:
        pairs = zip(self._variables(v), packed, strict=True)
        return Variables(*(packing.unpack(self._nth(v), vectors) for packing, vectors in pairs))

    def _given(
        self, v: int, params: Tree, again: tuple[Tree, Key], kept: list[jax.Array]
    ) -> tuple[Tree, Tree, Tree]:
        """What every half of a backward has: parameters, constant state and key, kept values."""
        packing, nth = self._variables(v), self._nth(v)
        constant = packing.constant.unpack(nth, again[0])
        return (
            packing.params.unpack(nth, params),
            (constant, again[1]),
            self._kept.unpack_list(v, kept),
        )

    def _pack_grads(self, v: int, dparams: Tree) -> Tree:
        return self._variables(v).params.pack(self._nth(v), dparams)
