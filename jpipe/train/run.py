"""One run of the command: train, validate, write."""

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
from flax import serialization
from rich.console import Console

from jpipe.cli import FAILED
from jpipe.optim import LossScaleError, check_loss_scale, loss_scale_state
from jpipe.processes import is_main, place_batch
from jpipe.schedule import save_figure
from jpipe.train.interrupt import Interrupt
from jpipe.train.plot import draw_losses
from jpipe.train.programs import Programs, compile_programs
from jpipe.train.report import describe_loss, describe_phases, make_progress, print_header
from jpipe.train.run_folder import SUMMARY
from jpipe.train.run_snapshots import RunSnapshots
from jpipe.train.setup import Setup
from jpipe.train.stepper import DamagedError
from jpipe.train_step import Metrics, TrainState, init_train_state
from jpipe.watchdog import APART, Watchdog

_REPEATS = 3  # of a step that arrives damaged


class StepError(ArithmeticError):
    """A step that leads nowhere: its loss or gradient norm is infinite or not a number, or what
    stages send each other is damaged again and again."""


class Run:
    """A prepared run under way.

    Args:
        setup: what it needs.
        console: where it reports to.
        watchdog: watches over what waits for devices and other processes.
    """

    def __init__(self, setup: Setup, console: Console, watchdog: Watchdog) -> None:
        self.setup = setup
        self.console = console
        self.losses: dict[int, float] = {}
        self.validation: dict[int, float] = {}
        self.skipped = 0  # steps that the loss scale skipped
        self.damaged: dict[int, int] = {}  # how often each step was
        self.snapshots = RunSnapshots(setup, self._say)
        self.watchdog = watchdog
        self.startup: dict[str, float] = {}  # seconds of each phase
        self.yardstick = setup.task.yardstick()

    def execute(self) -> int:
        """Run to the end, to an interrupt or to a loss that is not finite.

        Returns:
            The exit status.
        """
        setup, started = self.setup, time.perf_counter()
        if setup.folder.writable:
            save_figure(setup.schedule, setup.folder.path / "schedule.png")
        with (
            Interrupt() as interrupt,
            contextlib.closing(setup.folder),
            self._closing_snapshots(),
        ):
            with interrupt.nothing_to_lose():
                programs = compile_programs(setup, self._phase)
                print_header(self.console, setup, programs.memory, programs.memory_alone)
                self._say(f"start-up: {describe_phases(self.startup)}")
                if setup.options.dry_run:
                    return interrupt.status
                with (
                    self._phase("making the state"),
                    self.watchdog.watch_others("making the state", APART),
                ):
                    state, within = self._state(programs)
            try:
                while True:
                    try:
                        state = self._train(state, within, programs, interrupt)
                        break
                    except DamagedError as error:
                        state, within = self._again(error), None
                if interrupt.terminated:
                    return interrupt.status
                with self.watchdog.watch_others("the end of the run", APART):
                    self._finish(state, programs, interrupt, started)
            except StepError as error:
                self._draw()
                self.console.print(f"error: {error}", style="red", soft_wrap=True)
                return FAILED
        return interrupt.status

    @contextlib.contextmanager
    def _closing_snapshots(self) -> Iterator[None]:
        """While entered, there may be one under way."""
        try:
            yield
        finally:
            with self.watchdog.watch_others("writing the last snapshot"):
                self.snapshots.close()

    def _again(self, error: DamagedError) -> TrainState:
        """What to go on with after a step was damaged: what it began with is still there."""
        step = int(error.state.step) + 1
        self.damaged[step] = count = self.damaged.get(step, 0) + 1
        told = f"step {step}: {error}"
        if count > _REPEATS:
            raise StepError(
                f"{told}, for the {count}th time: a device or a link is at fault. "
                f"{self.setup.folder.path} keeps what came before"
            ) from error
        self._say(f"warning: {told}; repeating the step")
        self.setup.task.batches.set_state(error.cursor)
        with self.watchdog.watch_others("replacing the snapshots within the step"):
            self.snapshots.replace_within(error.state)
        return error.state

    def _state(self, programs: Programs) -> tuple[TrainState, tuple[Any, int] | None]:
        """A fresh one, or that of the snapshot to go on from, and what is held within its step."""
        setup = self.setup
        fresh = functools.partial(
            init_train_state,
            setup.task.init,
            setup.optimizer,
            setup.mesh,
            partition=setup.task.model.stages.partition,
        )
        state, within = self.snapshots.restore(fresh, programs.stepper.carry)
        for row in setup.folder.rewind(int(state.step)):
            self.skipped += row.get("skipped", False)
            if "loss" in row and not row.get("skipped"):
                self.losses[row["step"]] = row["loss"]
            if "validation_loss" in row:
                self.validation[row["step"]] = row["validation_loss"]
        return jax.block_until_ready(state), within

    def _train(
        self,
        state: TrainState,
        within: tuple[Any, int] | None,
        programs: Programs,
        interrupt: Interrupt,
    ) -> TrainState:
        steps, first = self.setup.options.steps, int(state.step) + 1
        with self.watchdog.watch("the start of every process", APART):
            interrupt.agree()
        with make_progress(self.console) as progress:
            task = progress.add_task("", total=steps, completed=first - 1, status="")
            for step in range(first, steps + 1):
                with self.watchdog.watch(f"step {step}"):
                    interrupt.agree()
                    if interrupt.requested:
                        break
                    state, status = self._step(step, state, within, programs, interrupt)
                if status is None:
                    break
                within = None
                with self.watchdog.watch_others(f"the snapshot after step {step}"):
                    self.snapshots.after_step(state, step)
                progress.update(task, completed=step, status=status)
        with self.watchdog.watch_others("the last snapshot"):
            interrupt.agree()
            self.snapshots.at_the_end(state)
        return state

    def _step(
        self,
        step: int,
        state: TrainState,
        within: tuple[Any, int] | None,
        programs: Programs,
        interrupt: Interrupt,
    ) -> tuple[TrainState, str | None]:
        """One step, and the validation that is due after it.

        Returns:
            The state, and how the step went; None if the run is to end within it.
        """
        setup, options, snapshots = self.setup, self.setup.options, self.snapshots
        snapshots.poll()
        started, cursor = time.perf_counter(), setup.task.batches.get_state()
        batch = place_batch(setup.mesh, setup.task.next_step(setup.rows), setup.microbatch_size)
        state, metrics = programs.stepper.take(
            state,
            batch,
            cursor,
            snapshots,
            within,
            lambda: self._is_to_end(interrupt),
            self.watchdog.note,
        )
        if metrics is None:
            setup.task.batches.set_state(cursor)  # the state is that before the step
            return state, None
        loss = float(metrics.loss)  # waits for the step
        seconds = time.perf_counter() - started
        item, items = setup.task.item, options.batch_size * setup.task.items_per_example
        rate_name = f"{'token' if item == 'byte' else item}s_per_s"
        if "the first step" not in self.startup:
            self.startup["the first step"] = seconds
            made = self.startup["making the state"]
            self._say(f"the state was made in {made:.1f} s, the first step {seconds:.1f} s")
        record = {**self._judge(step, state, metrics), rate_name: items / seconds}
        if options.eval_every and step % options.eval_every == 0 and step < options.steps:
            self.watchdog.note("its update")
            try:
                record["validation_loss"] = self._evaluate(step, state, programs)
            except StepError:
                setup.folder.log(record)  # the step itself was sound
                raise
        setup.folder.log(record)
        norm, rate = float(metrics.grad_norm), items / seconds
        return state, f"loss {loss:.3f} nats, norm {norm:.2f}, {rate:,.0f} {item}s/s"

    def _is_to_end(self, interrupt: Interrupt) -> bool:
        """Whether to end within a step."""
        interrupt.agree()
        return interrupt.terminated

    def _judge(self, step: int, state: TrainState, metrics: Metrics) -> dict[str, Any]:
        """What metrics.jsonl says of a step, if it was sound or its loss scale skipped it."""
        loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
        keeps = f"{self.setup.folder.path} keeps what came before"
        scaling = loss_scale_state(state.opt_state)
        record = {"step": step, "loss": loss, "grad_norm": grad_norm}
        if scaling is not None:
            record |= {"loss_scale": float(metrics.loss_scale)}
        if bool(metrics.skipped):
            try:
                check_loss_scale(state.opt_state)
            except LossScaleError as error:
                raise StepError(f"step {step}: {error}. {keeps}") from error
            self.skipped += 1
            sound = {name: value for name, value in record.items() if math.isfinite(value)}
            return {**sound, "skipped": True}
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise StepError(
                f"step {step}: the loss is {loss}, the gradient norm {grad_norm}; a lower "
                f"--learning-rate than {self.setup.options.learning_rate} may help. {keeps}"
            )
        self.losses[step] = loss
        return record

    def _evaluate(self, step: int, state: TrainState, programs: Programs) -> float:
        setup = self.setup
        rows = slice(setup.rows.start, setup.rows.stop)
        own = tuple(a[:, rows] for a in setup.task.validation)
        batch = place_batch(setup.mesh, own, setup.microbatch_size)
        value, aux = programs.evaluate(state.params, *batch, state.model_state)
        loss = float(value)
        if not math.isfinite(loss):
            raise StepError(
                f"step {step}: after its update the validation loss is {loss}; a lower "
                f"--learning-rate than {setup.options.learning_rate} may help. "
                f"{setup.folder.path} keeps what came before"
            )
        self.validation[step] = loss
        training = f"training {self.losses[step]:.3f} nats, " if step in self.losses else ""
        right = ""
        if "right" in aux:
            count = setup.task.validation[1].size
            right = f", {int(aux['right'])} of {count} right"
        self._say(f"step {step}: {training}validation {self._describe(loss)}{right}")
        return loss

    def _finish(
        self, state: TrainState, programs: Programs, interrupt: Interrupt, started: float
    ) -> None:
        """Write everything, then show what the model has learned."""
        setup, folder = self.setup, self.setup.folder
        last = int(state.step)
        ends_early = interrupt.requested  # whatever may be heard from here on
        if ends_early:
            self._say(f"interrupted after step {last}; writing everything")
        final = self._evaluate(last, state, programs)
        params = setup.task.model.to_plain(state.params, state.model_state)
        folder.write("params.msgpack", serialization.msgpack_serialize(params))
        self._draw()
        self._say(
            f"{self.yardstick.name} fitted on the same training data: validation "
            f"{self._describe(self.yardstick.loss)}"
        )
        if not ends_early:
            self._show(state)
        folder.write_json(
            SUMMARY,
            {
                "steps": last,
                "validation_loss": final,
                f"{self.yardstick.name.split()[0]}_validation_loss": self.yardstick.loss,
                "unit": f"nats per {setup.task.item}",
                "bytes_per_device": programs.memory.total,
                "bytes_on_one_device": programs.memory_alone and programs.memory_alone.total,
                "skipped_steps": self.skipped,
                "damaged_steps": sum(self.damaged.values()),
                **self.snapshots.summary(),
                "startup_seconds": self.startup,
                "seconds": time.perf_counter() - started,
            },
        )
        files = (
            sorted(p.name for p in folder.path.iterdir() if p.name[0] != ".") if is_main() else []
        )
        self._say(
            f"\nwrote {folder.path}/ in {time.perf_counter() - started:.0f} s: " + ", ".join(files)
        )

    def _show(self, state: TrainState) -> None:
        with self._status("sampling"):
            shown = self.setup.task.show(self.setup.mesh, state.params)
        if shown is None:
            return
        title, before, after = shown
        self._say(f"\n{title}")
        self.console.print(_printable(before), style="dim", end="", soft_wrap=True)
        self.console.print(_printable(after), soft_wrap=True)
        self.setup.folder.write("sample.txt", (before + after).encode())

    def _describe(self, loss: float) -> str:
        return describe_loss(loss, self.setup.task.item)

    def _draw(self) -> None:
        picture = draw_losses(self.losses, self.validation, self.yardstick, self.setup.task.item)
        self.setup.folder.write("loss.png", picture)

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    @contextlib.contextmanager
    def _phase(self, doing: str) -> Iterator[None]:
        """A phase of the start: shown while it lasts, and timed."""
        started = time.perf_counter()
        with self._status(doing):
            yield
        self.startup[doing] = time.perf_counter() - started

    @contextlib.contextmanager
    def _status(self, doing: str) -> Iterator[None]:
        with self.console.status(f"{doing} ..."):
            yield


def _printable(text: str) -> str:
    """The text without what would steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
