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
from jpipe.pipeline.losses import Loss, LossTerms, add_terms, loss_terms, no_terms
from jpipe.pipeline.program import Program, body_program
from jpipe.pipeline.residuals import SplitGradient
from jpipe.pipeline.rows import Beat, Row, table_rows
from jpipe.pipeline.stages import Params, Stages, Tree
from jpipe.schedule.slots import assign_slots
from jpipe.schedule.table import Op, Schedule


class Carry(NamedTuple):
    """What a stage holds between two ticks.

    Attributes:
        inbox: the activation or gradient that has arrived.
        outbox: what the last tick made, not yet sent; None with hop 1, where it leaves at once.
        kept: the stash, what each backward needs of its forward.
        tops: outputs of the body on the last stage, waiting for the head.
        grads: sums of gradients so far, at least float32.
        terms: sums of the loss terms so far.
    """

    inbox: Tree
    outbox: Tree
    kept: list[jax.Array]
    tops: Tree
    grads: Params
    terms: LossTerms


@dataclasses.dataclass(frozen=True, eq=False)
class Executor:
    """Runs one schedule of one model; to be used where the `stage` axis is manual.

    Attributes:
        stages: the model.
        loss: the loss of a microbatch.
        schedule: the table.
        axis: name of the mesh axis of the stages.
        params: this stage's parameters, see `layout.gather_params`.
        body_shapes: shapes and dtypes of the body's parameters, see `program.body_program`.
        inputs: pytree of `[M, microbatch, ...]` arrays.
        targets: pytree of `[M, microbatch, ...]` arrays.
    """

    stages: Stages
    loss: Loss
    schedule: Schedule
    axis: str
    params: Params
    body_shapes: Tree
    inputs: Tree
    targets: Tree

    def run(self) -> tuple[LossTerms, Params]:
        """Run every tick.

        Returns:
            The sums over the microbatches of their loss terms, on the last stage (0 on others),
            and the gradients of the total divided by M: of `body` for this stage's blocks, of
            `stem` and `head` where this stage runs them and else 0.
        """
        beats, rows = table_rows(self.schedule, self.axis)

        def group(carry: Carry, rows: Row) -> tuple[Carry, None]:
            for k, beat in enumerate(beats):
                row = jax.tree.map(lambda column, k=k: column[k], rows)
                carry = self._tick(carry, row, beat)
            return carry, None

        carry, _ = jax.lax.scan(group, self._start(), rows)
        return carry.terms, carry.grads

    @functools.cached_property
    def _program(self) -> Program:
        x = self.stages.boundary(self.params.stem, self.inputs)
        return body_program(self.stages, self.axis, self.params.body, self.body_shapes, x)

    @functools.cached_property
    def _split(self) -> SplitGradient:
        return self._program.split()

    def _run_stem(self, params: Tree, microbatch: jax.Array | int) -> Tree:
        x = self.stages.stem(params, stash.read(self.inputs, microbatch))
        return self._program.enter(x)

    def _run_head(self, params: Tree, payload: Tree, microbatch: jax.Array | int) -> LossTerms:
        outputs = self.stages.head(params, self._program.leave(payload))
        return loss_terms(self.loss(outputs, stash.read(self.targets, microbatch)))

    def _start(self) -> Carry:
        slots = assign_slots(self.schedule).per_stage
        payload = self._program.payload
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), payload)
        return Carry(
            inbox=nothing,
            outbox=nothing if self.schedule.hop == 2 else None,
            kept=stash.empty(int(slots.max()), self._split.kept),
            tops=stash.empty(int(slots[-1]), payload),
            grads=jax.tree.map(
                lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), self.params
            ),
            terms=no_terms(jax.eval_shape(self._run_head, self.params.head, payload, 0)),
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
        params = self.params
        stage = jax.lax.axis_index(self.axis)
        first, last = stage == 0, stage == self.schedule.num_stages - 1
        forward, backward = row.op == Op.FORWARD, row.op == Op.BACKWARD
        payload, _, kept, tops, grads, terms = carry

        def stem(_: Tree) -> Tree:
            return self._run_stem(params.stem, row.microbatch)

        def body(x: Tree, kept: Tree) -> tuple[Tree, Tree]:
            y, residuals = self._split.forward(params.body, x)
            return y, stash.write(kept, row.slot, residuals)

        def head_backward(_: Tree, sums: Tree, terms: LossTerms) -> tuple[Tree, Tree, LossTerms]:
            def total(params: Tree, y: Tree) -> tuple[jax.Array, LossTerms]:
                terms = self._run_head(params, y, row.microbatch)
                return terms.total, terms

            y = stash.read(tops, row.slot)
            value, pullback, new = jax.vjp(total, params.head, y, has_aux=True)
            dparams, dy = pullback(jnp.full_like(value, 1 / self.schedule.num_microbatches))
            return dy, _add(sums, dparams), add_terms(terms, new)

        def body_backward(dy: Tree, sums: Tree) -> tuple[Tree, Tree]:
            dparams, dx = self._split.backward(params.body, stash.read(kept, row.slot), dy)
            return dx, _add(sums, dparams)

        def stem_backward(sums: Tree) -> Tree:
            _, pullback = jax.vjp(lambda p: self._run_stem(p, row.microbatch), params.stem)
            return _add(sums, *pullback(payload))

        if Op.FORWARD in ops:
            payload = when(forward & first, stem, payload)
            payload, kept = when(forward, body, payload, kept)
            tops = when(forward & last, lambda t: stash.write(t, row.slot, payload), tops)
        if Op.BACKWARD in ops:
            payload, head_sums, terms = when(
                backward & last, head_backward, payload, grads.head, terms
            )
            payload, body_sums = when(backward, body_backward, payload, grads.body)
            stem_sums = when(backward & first, stem_backward, grads.stem)
            grads = Params(stem_sums, body_sums, head_sums)
        return payload, carry._replace(kept=kept, tops=tops, grads=grads, terms=terms)


def _add(sums: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads)
