"""One run of the command: compile, train, validate, write."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import serialization
from rich.console import Console

from jpipe.cli import FAILED, INTERRUPTED
from jpipe.data import bigram_loss
from jpipe.memory import Memory, memory_of
from jpipe.models import next_token_loss
from jpipe.pipeline import batch_sharding, pipeline_evaluate
from jpipe.schedule import save_figure
from jpipe.train.interrupt import Interrupt
from jpipe.train.plot import draw_losses
from jpipe.train.report import describe_loss, make_progress, print_header
from jpipe.train.sample import sample_tokens
from jpipe.train.setup import Setup
from jpipe.train_step import (
    TrainState,
    abstract_train_state,
    init_train_state,
    make_reference_step,
    make_train_step,
)

_PROMPT = 64
_SAMPLE = 256
_SAMPLE_TOKENS = 2**17  # seen in all, for each token sampled the model sees a whole context


class NotFiniteError(ArithmeticError):
    """The loss or the gradient norm of a step is infinite or not a number."""


class Programs(NamedTuple):
    """The compiled programs of a run, and what a step needs of memory."""

    step: Any
    evaluate: Any
    memory: Memory
    memory_alone: Memory
    seconds: float


class Run:
    """A prepared run under way.

    Args:
        setup: what it needs.
        console: where it reports to.
    """

    def __init__(self, setup: Setup, console: Console) -> None:
        self.setup = setup
        self.console = console
        self.losses: dict[int, float] = {}
        self.validation: dict[int, float] = {}
        self.yardstick = bigram_loss(
            setup.tokens.train, setup.validation.windows, setup.tokens.vocab_size
        )

    def execute(self) -> int:
        """Run to the end, to an interrupt or to a loss that is not finite.

        Returns:
            The exit status.
        """
        setup, started = self.setup, time.perf_counter()
        save_figure(setup.schedule, setup.folder.path / "schedule.png")
        with Interrupt() as interrupt, contextlib.closing(setup.folder):
            programs = self._compile()
            print_header(self.console, setup, programs.memory, programs.memory_alone)
            self._say(f"compiled in {programs.seconds:.1f} s")
            if setup.options.dry_run:
                return INTERRUPTED if interrupt.requested else 0
            state = init_train_state(setup.init, setup.optimizer, setup.mesh)
            try:
                state = self._train(state, programs, interrupt)
                self._finish(state, programs, interrupt, started)
            except NotFiniteError as error:
                self._draw()
                self.console.print(f"error: {error}", style="red", soft_wrap=True)
                return FAILED
        return INTERRUPTED if interrupt.requested else 0

    def _compile(self) -> Programs:
        setup, stages = self.setup, self.setup.model.stages
        started = time.perf_counter()

        def arrays(shape: tuple[int, ...], sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)

        sharding = batch_sharding(setup.mesh)
        windows = setup.validation.windows.inputs.shape
        step_shape = (setup.options.microbatches, *windows[1:])
        with self._status("compiling the training step"):
            step = make_train_step(
                stages, next_token_loss, setup.optimizer, setup.mesh, setup.schedule
            )
            state = abstract_train_state(setup.init, setup.optimizer, setup.mesh)
            batch = arrays(step_shape, sharding)
            compiled_step = step.lower(state, batch, batch).compile()
        with self._status("compiling the evaluation"):
            evaluate = pipeline_evaluate(stages, next_token_loss, setup.mesh)
            batch = arrays(windows, sharding)
            compiled_evaluate = evaluate.lower(state.params, batch, batch).compile()
        with self._status("compiling for one device, to compare memory"):
            alone = make_reference_step(stages, next_token_loss, setup.optimizer)
            batch = arrays(step_shape, None)
            state = abstract_train_state(setup.init, setup.optimizer)
            compiled_alone = alone.lower(state, batch, batch).compile()
        return Programs(
            step=compiled_step,
            evaluate=compiled_evaluate,
            memory=memory_of(compiled_step),
            memory_alone=memory_of(compiled_alone),
            seconds=time.perf_counter() - started,
        )

    def _train(self, state: TrainState, programs: Programs, interrupt: Interrupt) -> TrainState:
        setup, options = self.setup, self.setup.options
        sharding = batch_sharding(setup.mesh)
        tokens = options.batch_size * options.context
        with make_progress(self.console) as progress:
            task = progress.add_task("", total=options.steps, status="")
            for step in range(1, options.steps + 1):
                if interrupt.requested:
                    break
                started = time.perf_counter()
                batch = jax.device_put(setup.batches.next_step(options.microbatches), sharding)
                state, metrics = programs.step(state, *batch)
                loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
                rate = tokens / (time.perf_counter() - started)
                if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                    raise NotFiniteError(
                        f"step {step}: the loss is {loss}, the gradient norm {grad_norm}; "
                        f"a lower --learning-rate than {options.learning_rate} may help. "
                        f"{setup.folder.path} keeps what came before"
                    )
                self.losses[step] = loss
                record = {
                    "step": step,
                    "loss": loss,
                    "grad_norm": grad_norm,
                    "tokens_per_s": rate,
                }
                if options.eval_every and step % options.eval_every == 0 and step < options.steps:
                    try:
                        record["validation_loss"] = self._evaluate(step, state, programs)
                    except NotFiniteError:
                        setup.folder.log(record)  # the step itself was sound
                        raise
                setup.folder.log(record)
                progress.update(
                    task,
                    completed=step,
                    status=f"loss {loss:.3f} nats, norm {grad_norm:.2f}, {rate:,.0f} tokens/s",
                )
        return state

    def _evaluate(self, step: int, state: TrainState, programs: Programs) -> float:
        batch = jax.device_put(self.setup.validation.windows, batch_sharding(self.setup.mesh))
        loss = float(programs.evaluate(state.params, *batch))
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"step {step}: after its update the validation loss is {loss}; a lower "
                f"--learning-rate than {self.setup.options.learning_rate} may help. "
                f"{self.setup.folder.path} keeps what came before"
            )
        self.validation[step] = loss
        training = f"training {self.losses[step]:.3f} nats, " if step in self.losses else ""
        self._say(f"step {step}: {training}validation {describe_loss(loss, self.setup.unit)}")
        return loss

    def _finish(
        self, state: TrainState, programs: Programs, interrupt: Interrupt, started: float
    ) -> None:
        """Write everything, then show what the model has learned."""
        setup, folder = self.setup, self.setup.folder
        last = max(self.losses, default=0)
        if interrupt.requested:
            self._say(f"interrupted after step {last}; writing everything")
        final = self._evaluate(last, state, programs)
        params = setup.model.to_plain(state.params)
        folder.write("params.msgpack", serialization.msgpack_serialize(params))
        self._draw()
        folder.write_json(
            "summary.json",
            {
                "steps": last,
                "validation_loss": final,
                "bigram_validation_loss": self.yardstick,
                "unit": f"nats per {setup.unit}",
                "bytes_per_device": programs.memory.total,
                "bytes_on_one_device": programs.memory_alone.total,
                "compile_seconds": programs.seconds,
                "seconds": time.perf_counter() - started,
            },
        )
        self._say(
            "bigram model fitted on the same training text: validation "
            f"{describe_loss(self.yardstick, setup.unit)}"
        )
        if not interrupt.requested:
            self._show_sample(state)
        self._say(
            f"\nwrote {folder.path}/ in {time.perf_counter() - started:.0f} s: "
            + ", ".join(sorted(p.name for p in folder.path.iterdir() if p.name[0] != "."))
        )

    def _show_sample(self, state: TrainState) -> None:
        setup, context = self.setup, self.setup.options.context
        length = max(1, min(_SAMPLE, _SAMPLE_TOKENS // context))
        prompt = setup.validation.windows.inputs[0, 0, : min(_PROMPT, context)]
        with self._status("sampling"):
            added = sample_tokens(
                setup.model.stages,
                setup.mesh,
                state.params,
                prompt,
                context=context,
                length=length,
                seed=setup.options.seed,
            )
        if setup.tokens.is_bytes:
            before, after = (
                bytes(t.astype(np.uint8)).decode("utf-8", "replace") for t in (prompt, added)
            )
        else:
            before, after = (" ".join(map(str, t)) + " " for t in (prompt, added))
        self._say(f"\na sample: {length} {setup.unit}s after a prompt from the validation text")
        self.console.print(_printable(before), style="dim", end="", soft_wrap=True)
        self.console.print(_printable(after), soft_wrap=True)
        setup.folder.write("sample.txt", (before + after).encode())

    def _draw(self) -> None:
        picture = draw_losses(self.losses, self.validation, self.yardstick, self.setup.unit)
        self.setup.folder.write("loss.png", picture)

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    @contextlib.contextmanager
    def _status(self, doing: str) -> Iterator[None]:
        with self.console.status(f"{doing} ..."):
            yield


def _printable(text: str) -> str:
    """The text without what would steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
