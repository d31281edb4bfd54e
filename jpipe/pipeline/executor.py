"""Run a training schedule: one scan over its ticks, the same program on every stage.

In a tick a stage runs what its column of the table says, each operation in a conditional of its
own that takes and returns only what it writes, so that idle ticks cost nothing and XLA has no
reason to copy the large buffers through branches that do not touch them. The exchange lies outside
of the stage-dependent conditionals: a collective in a branch that not all its devices take would
wait for ever.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpipe.pipeline import stash
from jpipe.pipeline.control import send, when
from jpipe.pipeline.divide import divide, divided_examples
from jpipe.pipeline.keys import microbatch_keys
from jpipe.pipeline.losses import Loss, LossTerms, add_terms, loss_terms, no_terms
from jpipe.pipeline.program import Program, body_program
from jpipe.pipeline.residuals import SplitGradient, split_gradient
from jpipe.pipeline.rows import Beat, Row, table_rows
from jpipe.pipeline.stages import Params, Parts, Tree
from jpipe.pipeline.state import State, Variables
from jpipe.schedule.slots import assign_slots
from jpipe.schedule.table import Op, Schedule


class Carry(NamedTuple):
    """What a stage holds between two ticks.

    Attributes:
        inbox: the activation or gradient that has arrived.
        outbox: what the last tick made, not yet sent; None with hop 1, where it leaves at once.
        kept: the stash, what each backward needs of its forward.
        kept_by_stem: the same of the stem: nothing, unless its output depends on moving state.
        tops: outputs of the body on the last stage, waiting for the head.
        moving: the state, with the updates so far of the parts that this stage runs.
        grads: sums of gradients so far, at least float32.
        terms: sums of the loss terms so far.
    """

    inbox: Tree
    outbox: Tree
    kept: list[jax.Array]
    kept_by_stem: list[jax.Array]
    tops: Tree
    moving: Params
    grads: Params
    terms: LossTerms


@dataclasses.dataclass(frozen=True, eq=False)
class Executor:
    """Runs one schedule of one model; to be used where the `stage` axis is manual.

    Attributes:
        parts: the model.
        loss: the loss of a microbatch.
        schedule: the table.
        axis: name of the mesh axis of the stages.
        own: this stage's variables, see `layout.gather_params`.
        body_shapes: shapes and dtypes of the body's variables, see `program.body_program`.
        key: the step's random key, or None.
        inputs: pytree of `[M, microbatch, ...]` arrays.
        targets: pytree of `[M, microbatch, ...]` arrays.
    """

    parts: Parts
    loss: Loss
    schedule: Schedule
    axis: str
    own: Variables
    body_shapes: Variables
    key: jax.Array | None
    inputs: Tree
    targets: Tree

    def run(self) -> tuple[LossTerms, Params, Params]:
        """Run every tick.

        Returns:
            The sums over the microbatches of their loss terms, on the last stage (0 on others),
            the gradients of the total divided by M: of `body` for this stage's blocks, of `stem`
            and `head` where this stage runs them and else 0; and the moving state, up to date in
            the same places and elsewhere as it was.
        """
        beats, rows = table_rows(self.schedule, self.axis)

        def group(carry: Carry, rows: Row) -> tuple[Carry, None]:
            for k, beat in enumerate(beats):
                row = jax.tree.map(lambda column, k=k: column[k], rows)
                carry = self._tick(carry, row, beat)
            return carry, None

        carry, _ = jax.lax.scan(group, self._start(), rows)
        return carry.terms, carry.grads, carry.moving

    @functools.cached_property
    def _rows(self) -> int | None:
        return divided_examples(self.inputs)

    @functools.cached_property
    def _program(self) -> Program:
        own = self.own.part("stem")
        x, _ = jax.eval_shape(self._run_stem, own.params, self._stem_again(0), (), own.moving)
        key = microbatch_keys(self.key, 0).body
        return body_program(
            self.parts.body, self.axis, self.own.part("body"), self.body_shapes, x, key, self._rows
        )

    @functools.cached_property
    def _split(self) -> SplitGradient:
        return self._program.split()

    @functools.cached_property
    def _split_stem(self) -> SplitGradient:
        def stem(params: Tree, again: Tree, _: Tree, moving: Tree) -> tuple[Tree, Tree]:
            x, updates = self._run_stem(params, again, (), moving)
            return self._program.enter(x), updates

        own = self.own.part("stem")
        return split_gradient(stem, own.params, self._stem_again(0), (), own.moving)

    def _run_stem(self, params: Tree, again: Tree, _: Tree, moving: Tree) -> tuple[Tree, Tree]:
        inputs, constant, key = again
        inputs = divide(inputs, self._rows)
        x, updates = self.parts.stem(params, State(moving, constant).whole(), inputs, key)
        return divide(x, self._rows), updates

    def _stem_again(self, microbatch: jax.Array | int) -> Tree:
        """What the stem's backward computes the stem again from."""
        key = microbatch_keys(self.key, microbatch).stem
        return stash.read(self.inputs, microbatch), self.own.constant.stem, key

    def _body_again(self, microbatch: jax.Array | int) -> Tree:
        return self.own.constant.body, microbatch_keys(self.key, microbatch).body

    def _run_head(
        self, params: Tree, payload: Tree, moving: Tree, microbatch: jax.Array | int
    ) -> tuple[LossTerms, Tree]:
        state = State(moving, self.own.constant.head).whole()
        key = microbatch_keys(self.key, microbatch).head
        x = divide(self._program.leave(payload), self._rows)
        outputs, updates = self.parts.head(params, state, x, key)
        targets = divide(stash.read(self.targets, microbatch), self._rows)
        return loss_terms(self.loss(outputs, targets)), updates

    def _start(self) -> Carry:
        slots = assign_slots(self.schedule).per_stage
        payload = self._program.payload
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), payload)
        return Carry(
            inbox=nothing,
            outbox=nothing if self.schedule.hop == 2 else None,
            kept=stash.empty(int(slots.max()), self._split.kept),
            kept_by_stem=stash.empty(int(slots[0]), self._split_stem.kept),
            tops=stash.empty(int(slots[-1]), payload),
            moving=self.own.moving,
            grads=jax.tree.map(
                lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)),
                self.own.params,
            ),
            terms=no_terms(
                jax.eval_shape(
                    self._run_head, self.own.params.head, payload, self.own.moving.head, 0
                )[0]
            ),
        )

    def _tick(self, carry: Carry, row: Row, beat: Beat) -> Carry:
        """Run one row, and send what it made, or with hop 2 what the row before made."""
        if self.schedule.hop == 1:
            made, carry = self._operate(carry, row, beat.ops)
            return carry._replace(inbox=send(made, self.schedule, beat, row, self.axis))
        arrived = send(carry.outbox, self.schedule, beat, row, self.axis)
        made, carry = self._operate(carry, row, beat.ops)
        return carry._replace(inbox=arrived, outbox=made)

    def _operate(self, carry: Carry, row: Row, ops: frozenset[Op]) -> tuple[Tree, Carry]:
        """Run the operation of one row on what has arrived; return what it made."""
        params = self.own.params
        stage = jax.lax.axis_index(self.axis)
        first, last = stage == 0, stage == self.schedule.num_stages - 1
        forward, backward = row.op == Op.FORWARD, row.op == Op.BACKWARD
        payload, _, kept, kept_by_stem, tops, moving, grads, terms = carry

        def stem(_: Tree, kept: Tree, moving: Tree) -> tuple[Tree, Tree, Tree]:
            again = self._stem_again(row.microbatch)
            x, updates, residuals = self._split_stem.forward(params.stem, again, (), moving)
            return x, stash.write(kept, row.slot, residuals), updates

        def body(x: Tree, kept: Tree, moving: Tree) -> tuple[Tree, Tree, Tree]:
            again = self._body_again(row.microbatch)
            y, updates, residuals = self._split.forward(params.body, again, x, moving)
            return y, stash.write(kept, row.slot, residuals), updates

        def head_backward(
            _: Tree, sums: Tree, moving: Tree, terms: LossTerms
        ) -> tuple[Tree, Tree, Tree, LossTerms]:
            def total(params: Tree, y: Tree) -> tuple[jax.Array, tuple[LossTerms, Tree]]:
                terms, updates = self._run_head(params, y, moving, row.microbatch)
                return terms.total, (terms, updates)

            y = stash.read(tops, row.slot)
            value, pullback, (new, updates) = jax.vjp(total, params.head, y, has_aux=True)
            dparams, dy = pullback(jnp.full_like(value, 1 / self.schedule.num_microbatches))
            return dy, _add(sums, dparams), updates, add_terms(terms, new)

        def body_backward(dy: Tree, sums: Tree) -> tuple[Tree, Tree]:
            again, residuals = self._body_again(row.microbatch), stash.read(kept, row.slot)
            dparams, dx = self._split.backward(params.body, again, residuals, dy)
            return dx, _add(sums, dparams)

        def stem_backward(sums: Tree) -> Tree:
            again, residuals = self._stem_again(row.microbatch), stash.read(kept_by_stem, row.slot)
            dparams, _ = self._split_stem.backward(params.stem, again, residuals, payload)
            return _add(sums, dparams)

        of_stem, of_body, of_head = moving
        if Op.FORWARD in ops:
            payload, kept_by_stem, of_stem = when(
                forward & first, stem, payload, kept_by_stem, of_stem
            )
            payload, kept, of_body = when(forward, body, payload, kept, of_body)
            tops = when(forward & last, lambda t: stash.write(t, row.slot, payload), tops)
        if Op.BACKWARD in ops:
            payload, head_sums, of_head, terms = when(
                backward & last, head_backward, payload, grads.head, of_head, terms
            )
            payload, body_sums = when(backward, body_backward, payload, grads.body)
            stem_sums = when(backward & first, stem_backward, grads.stem)
            grads = Params(stem_sums, body_sums, head_sums)
        return payload, carry._replace(
            kept=kept,
            kept_by_stem=kept_by_stem,
            tops=tops,
            moving=Params(of_stem, of_body, of_head),
            grads=grads,
            terms=terms,
        )


def _add(sums: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads)
