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
from jpipe.pipeline.control import deliver, fetch, send, when
from jpipe.pipeline.divide import divide, divided_examples
from jpipe.pipeline.keys import microbatch_keys
from jpipe.pipeline.losses import Loss, LossTerms, add_terms, loss_terms, no_terms
from jpipe.pipeline.per_stage import chunks_of, like_chunks
from jpipe.pipeline.program import Program, body_program
from jpipe.pipeline.residuals import SplitGradient, split_gradient
from jpipe.pipeline.rows import Beat, Row, Rows, table_rows
from jpipe.pipeline.stages import Params, Parts, Tree
from jpipe.pipeline.state import State, Variables
from jpipe.pipeline.verify import INTACT, Sealed, first_mismatch, seal
from jpipe.pipeline.weight_gradient import SplitBackward
from jpipe.schedule.slots import Inbox, assign_inbox, assign_slots, assign_weight_slots
from jpipe.schedule.table import Op, Schedule


class Carry(NamedTuple):
    """What a stage holds between two ticks.

    Attributes:
        inbox: the activations and gradients that have arrived.
        outbox: what the last tick made, not yet sent; None with hop 1, where it leaves at once.
        kept: the stash, what each backward needs of its forward.
        kept_by_stem: the same of the stem: nothing, unless its output depends on moving state.
        left: what each weight gradient needs of its backward, where the table splits them.
        tops: outputs of the body on the last stage, waiting for the head.
        moving: the state, with the updates so far of the parts that this stage runs.
        grads: sums of gradients so far, at least float32.
        terms: sums of the loss terms so far.
        mismatch: the first tick in which something was read that was not what had been sent, or
            `verify.INTACT`; None if that is not verified.
    """

    inbox: Tree
    outbox: Tree
    kept: list[jax.Array]
    kept_by_stem: list[jax.Array]
    left: list[jax.Array]
    tops: Tree
    moving: Params
    grads: Params
    terms: LossTerms
    mismatch: jax.Array | None


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
        loss_scale: float32 scalar by which all gradients are multiplied, from the loss on; None for
            1.
        verify: whether payloads travel with checksum and address.
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
    loss_scale: jax.Array | None
    verify: bool
    inputs: Tree
    targets: Tree

    def run(self) -> Carry:
        """Run every tick.

        Returns:
            What the stage holds after the last. `terms` are the sums over the microbatches of their
            loss terms, on the last stage (0 on others); `grads` the gradients of the total times
            `loss_scale / M`: of `body` for this stage's blocks, of `stem` and `head` where this
            stage runs them and else 0; `moving` is up to date in the same places and elsewhere as
            it was.
        """
        beats, rows = table_rows(self.schedule, self._inbox, self.axis)
        return self._scan(self.start(), beats, rows)

    def advance(self, carry: Carry, first: jax.Array, count: int) -> Carry:
        """Run some of the ticks; for all in turn the carry ends as that of `run`.

        Args:
            carry: what the stage holds, at first `start()`.
            first: the first period of the table to run.
            count: how many periods; beyond the table's end nothing happens.
        """
        beats, rows = table_rows(self.schedule, self._inbox, self.axis)

        def some(column: jax.Array) -> jax.Array:
            padded = jnp.pad(column, ((0, -len(column) % count), (0, 0)))
            return jax.lax.dynamic_slice_in_dim(padded, first, count)

        return self._scan(carry, beats, jax.tree.map(some, rows))

    def _scan(self, carry: Carry, beats: list[Beat], rows: Rows) -> Carry:
        # Made here and not where they are first used, within a trace that they would not outlive.
        _ = self._program, self._splits, self._halves, self._split_stem

        def group(carry: Carry, rows: Rows) -> tuple[Carry, None]:
            for k, beat in enumerate(beats):
                own = jax.tree.map(lambda column, k=k: column[k], rows)
                carry = self._tick(carry, own, beat)
            return carry, None

        return jax.lax.scan(group, carry, rows)[0]

    @functools.cached_property
    def _inbox(self) -> Inbox:
        return assign_inbox(self.schedule)

    @property
    def _chunks(self) -> range:
        return range(self.schedule.num_chunks)

    @functools.cached_property
    def _rows(self) -> int | None:
        return divided_examples(self.inputs)

    @functools.cached_property
    def _program(self) -> Program:
        own = self.own.part("stem")
        x, _ = jax.eval_shape(self._run_stem, own.params, self._stem_again(0), (), own.moving)
        key = microbatch_keys(self.key, 0).body
        return body_program(
            self.parts.body,
            self.axis,
            self.own.part("body"),
            self.body_shapes,
            x,
            key,
            self._rows,
            folded=self.schedule.folded,
        )

    @functools.cached_property
    def _splits(self) -> list[SplitGradient]:
        splits = [self._program.split(c) for c in self._chunks]
        _check_alike("keep", [split.kept for split in splits])
        return splits

    @functools.cached_property
    def _halves(self) -> list[SplitBackward]:
        if not self.schedule.splits_backward:
            return []
        halves = [self._program.split_backward(c, self._splits[c]) for c in self._chunks]
        _check_alike("leave", [half.left for half in halves])
        return halves

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

    def _body_again(self, chunk: int, microbatch: jax.Array | int) -> Tree:
        constant = chunks_of(self.own.constant.body)[chunk]
        return self._program.again(chunk, constant, microbatch_keys(self.key, microbatch).body)

    def _run_head(
        self, params: Tree, payload: Tree, moving: Tree, microbatch: jax.Array | int
    ) -> tuple[LossTerms, Tree]:
        state = State(moving, self.own.constant.head).whole()
        key = microbatch_keys(self.key, microbatch).head
        x = divide(self._program.leave(payload), self._rows)
        outputs, updates = self.parts.head(params, state, x, key)
        targets = divide(stash.read(self.targets, microbatch), self._rows)
        return loss_terms(self.loss(outputs, targets)), updates

    def start(self) -> Carry:
        """What a stage holds before the first tick."""
        slots = assign_slots(self.schedule).per_stage
        weight_slots = int(assign_weight_slots(self.schedule).per_stage.max())
        payload = self._program.payload
        letter: Tree = payload
        if self.verify:
            letter = Sealed(payload, jnp.uint32(0), jnp.zeros(3, jnp.int32))
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), letter)
        return Carry(
            inbox=stash.empty(self._inbox.size, letter),
            outbox=nothing if self.schedule.hop == 2 else None,
            kept=stash.empty(int(slots.max()), self._splits[0].kept),
            kept_by_stem=stash.empty(int(slots[0]), self._split_stem.kept),
            left=stash.empty(weight_slots, self._halves[0].left) if self._halves else [],
            tops=stash.empty(int(slots[self.schedule.stage_of(self.schedule.last)]), payload),
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
            mismatch=jnp.int32(INTACT) if self.verify else None,
        )

    def _tick(self, carry: Carry, rows: Rows, beat: Beat) -> Carry:
        """Run one row, and send what it made, or with hop 2 what the row before made.

        With hop 1 the weight gradient of the next row comes here, too: nothing that arrives is
        needed for it, so it can run beside the exchange. It comes after the operation, which may
        write to the stash that it reads: in another order XLA would copy the stash.
        """
        row, hop = rows.now, self.schedule.hop
        arrived = self._send(carry.outbox, beat, row) if hop == 2 else ()
        payload, carry = self._open(fetch(carry.inbox, self._inbox, row), carry, row)
        made, carry = self._operate(payload, carry, row, beat.ops)
        made = self._seal(made, row)
        if hop == 1:
            arrived = self._send(made, beat, row)
        if Op.WEIGHT in (beat.next_ops if hop == 1 else beat.ops):
            carry = self._weight_gradients(carry, rows.next if hop == 1 else row)
        inbox = deliver(carry.inbox, arrived, self._inbox, row)
        return carry._replace(inbox=inbox, outbox=made if hop == 2 else None)

    def _send(self, payload: Tree, beat: Beat, row: Row) -> tuple[Tree, ...]:
        return send(payload, self.schedule, self._inbox.num_lanes, beat, row, self.axis)

    def _open(self, letter: Tree, carry: Carry, row: Row) -> tuple[Tree, Carry]:
        """The payload that a row reads, compared with its checksum and address."""
        if not self.verify:
            return letter, carry
        mismatch = first_mismatch(letter, row, self.schedule.last, carry.mismatch)
        return letter.payload, carry._replace(mismatch=mismatch)

    def _seal(self, made: Tree, row: Row) -> Tree:
        """What a row made, with its checksum and address."""
        return seal(made, row, self.schedule.last) if self.verify else made

    def _ends(self, row: Row) -> tuple[jax.Array, jax.Array]:
        """Whether a row is of the first, or of the last of all virtual stages."""
        return row.virtual == 0, row.virtual == self.schedule.last

    def _operate(
        self, payload: Tree, carry: Carry, row: Row, ops: frozenset[Op]
    ) -> tuple[Tree, Carry]:
        """Run the forward or backward of one row on what has arrived; return what it made."""
        params = self.own.params
        forward, backward = row.op == Op.FORWARD, row.op == Op.BACKWARD
        first, last = self._ends(row)

        def stem(_: Tree, kept: Tree, moving: Tree) -> tuple[Tree, Tree, Tree]:
            again = self._stem_again(row.microbatch)
            x, updates, residuals = self._split_stem.forward(params.stem, again, (), moving)
            return x, stash.write(kept, row.slot, residuals), updates

        def body(c: int, x: Tree, kept: Tree, moving: Tree) -> tuple[Tree, Tree, Tree]:
            again, own = self._body_again(c, row.microbatch), chunks_of(params.body)[c]
            y, updates, residuals = self._splits[c].forward(own, again, x, moving)
            return y, stash.write(kept, row.slot, residuals), updates

        def head_backward(
            _: Tree, sums: Tree, moving: Tree, terms: LossTerms
        ) -> tuple[Tree, Tree, Tree, LossTerms]:
            def total(params: Tree, y: Tree) -> tuple[jax.Array, tuple[LossTerms, Tree]]:
                terms, updates = self._run_head(params, y, moving, row.microbatch)
                return terms.total, (terms, updates)

            y = stash.read(tops, row.slot)
            value, pullback, (new, updates) = jax.vjp(total, params.head, y, has_aux=True)
            seed = jnp.full_like(value, 1 / self.schedule.num_microbatches)
            dparams, dy = pullback(seed if self.loss_scale is None else seed * self.loss_scale)
            return dy, _add(sums, dparams), updates, add_terms(terms, new)

        def body_backward(c: int, dy: Tree, sums: Tree) -> tuple[Tree, Tree]:
            again, own = self._body_again(c, row.microbatch), chunks_of(params.body)[c]
            residuals = stash.read(kept, row.slot)
            dparams, dx = self._splits[c].backward(own, again, residuals, dy)
            return dx, _add(sums, dparams)

        def body_input_gradient(c: int, dy: Tree, left: Tree) -> tuple[Tree, Tree]:
            again, own = self._body_again(c, row.microbatch), chunks_of(params.body)[c]
            residuals = stash.read(kept, row.slot)
            dx, values = self._halves[c].inputs(own, again, residuals, dy)
            return dx, stash.write(left, row.weight_slot, values)

        def stem_backward(sums: Tree, dx: Tree) -> Tree:
            again = self._stem_again(row.microbatch)
            residuals = stash.read(kept_by_stem, row.slot)
            dparams, _ = self._split_stem.backward(params.stem, again, residuals, dx)
            return _add(sums, dparams)

        _, _, kept, kept_by_stem, left, tops, moving, grads, terms, _ = carry
        of_stem, of_head = moving.stem, moving.head
        of_body, body_sums = list(chunks_of(moving.body)), list(chunks_of(grads.body))
        stem_sums, head_sums = grads.stem, grads.head
        if Op.FORWARD in ops:
            payload, kept_by_stem, of_stem = when(
                forward & first, stem, payload, kept_by_stem, of_stem
            )
            for c in self._chunks:
                payload, kept, of_body[c] = when(
                    forward & self._runs(c, row),
                    functools.partial(body, c),
                    payload,
                    kept,
                    of_body[c],
                )
            tops = when(forward & last, lambda t: stash.write(t, row.slot, payload), tops)
        if Op.BACKWARD in ops:
            payload, head_sums, of_head, terms = when(
                backward & last, head_backward, payload, head_sums, of_head, terms
            )
            for c in self._chunks:
                runs = backward & self._runs(c, row)
                if self._halves:
                    half = functools.partial(body_input_gradient, c)
                    payload, left = when(runs, half, payload, left)
                else:
                    whole = functools.partial(body_backward, c)
                    payload, body_sums[c] = when(runs, whole, payload, body_sums[c])
            stem_sums = when(backward & first, lambda sums: stem_backward(sums, payload), stem_sums)
        return payload, carry._replace(
            kept=kept,
            kept_by_stem=kept_by_stem,
            left=left,
            tops=tops,
            moving=Params(of_stem, like_chunks(moving.body, of_body), of_head),
            grads=Params(stem_sums, like_chunks(grads.body, body_sums), head_sums),
            terms=terms,
        )

    def _weight_gradients(self, carry: Carry, row: Row) -> Carry:
        """Run the weight gradient of one row."""

        def weights(c: int, sums: Tree) -> Tree:
            again, own = self._body_again(c, row.microbatch), chunks_of(self.own.params.body)[c]
            kept = stash.read(carry.kept, row.slot)
            left = stash.read(carry.left, row.weight_slot)
            return _add(sums, self._halves[c].weights(own, again, kept, left))

        body = carry.grads.body
        sums = [
            when(
                (row.op == Op.WEIGHT) & self._runs(c, row), functools.partial(weights, c), own_sums
            )
            for c, own_sums in enumerate(chunks_of(body))
        ]
        return carry._replace(grads=carry.grads._replace(body=like_chunks(body, sums)))

    def _runs(self, chunk: int, row: Row) -> jax.Array | bool:
        """Whether a row is that of a chunk."""
        return row.chunk == chunk if len(self._chunks) > 1 else True


def _check_alike(verb: str, chunks: list[list[jax.ShapeDtypeStruct]]) -> None:
    """Refuse chunks whose functions would need stashes of different shapes."""
    for c, own in enumerate(chunks):
        if own != chunks[0]:
            raise ValueError(
                f"stages.body[{c}] and stages.body[0] {verb} arrays of different shapes between "
                "forward and backward; chunks of stacked blocks must run the same function, others "
                "need a PerStage in each chunk"
            )


def _add(sums: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads)
