"""What safety costs while nothing happens: verified exchanges, and snapshots within a step.

    python experiments/safety/measure.py [--rounds 20]

The command's default run on four simulated devices: its step alone, with `--verify-comm`, in
segments of about five microbatches, and with a snapshot after each segment, taken in turn in one
process. Simulated devices share the CPU's cores, so process CPU time counts what all of them and
the threads that write do; wall time is what a run takes. Writes RESULTS.md beside this file.
"""

import argparse
import contextlib
import datetime
import functools
import os
import platform
import statistics
import tempfile
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpipe.integrity import device_crc32
from jpipe.pipeline import batch_sharding
from jpipe.processes import place_batch
from jpipe.train.options import parse_options
from jpipe.train.run_snapshots import RunSnapshots
from jpipe.train.setup import prepare
from jpipe.train.stepper import Stepper
from jpipe.train_step import abstract_train_state, init_train_state
from jpipe.watchdog import Watchdog

FOLDER = Path(__file__).parent
WITHIN = 5  # microbatches
STEPS = 3  # of a case in a round
CHECKSUMS = 32  # in a program
SEGMENTS = ["--snapshot-every-microbatches", str(WITHIN)]
CASES = {
    "plain": [],
    "`--verify-comm`": ["--verify-comm"],
    "in segments, nothing saved": [*SEGMENTS],
    f"snapshots every {WITHIN} microbatches": [*SEGMENTS],
    "both": [*SEGMENTS, "--verify-comm"],
}
SAVES = {f"snapshots every {WITHIN} microbatches", "both"}


class NoSnapshots:
    """In place of those of a run, to tell segments from snapshots."""

    def within_step(self, *_: Any) -> None:
        """Take none."""

    def wait(self) -> None:
        """Nothing is being written."""


class Case:
    """A run of the command, as far as its steps."""

    def __init__(self, name: str, arguments: list[str], folder: Path) -> None:
        shared = ["--mesh", "4", "--platform", "cpu", "--snapshot-every-steps", "0"]
        self._setup = setup = prepare(
            parse_options([*shared, *arguments, "--out", str(folder)]), Watchdog(None)
        )
        task, count = setup.task, setup.options.microbatches
        sharding = batch_sharding(setup.mesh)
        shapes = [
            jax.ShapeDtypeStruct((count, *a.shape), a.dtype, sharding=sharding)
            for a in (task.inputs, task.targets)
        ]
        self._stepper = Stepper(
            setup, abstract_train_state(task.init, setup.optimizer, setup.mesh), shapes
        )
        self._stepper.compile()
        self._state = init_train_state(task.init, setup.optimizer, setup.mesh)
        self._cursor = task.batches.get_state()
        rows = task.next_step(setup.rows)
        self._batch = place_batch(setup.mesh, rows, setup.microbatch_size)
        self.snapshots: Any = RunSnapshots(setup, print) if name in SAVES else NoSnapshots()

    def step(self) -> None:
        """Take one."""
        self._state, metrics = self._stepper.take(
            self._state,
            self._batch,
            self._cursor,
            self.snapshots,
            None,
            lambda: False,
            lambda _: None,
        )
        assert metrics is not None
        float(metrics.loss)

    @property
    def payload(self) -> jax.Array:
        """What a stage sends: the activations of a microbatch."""
        options = self._setup.options
        shape = (self._setup.microbatch_size, options.context, options.width)
        return jax.numpy.asarray(np.random.default_rng(0).normal(size=shape), "float32")


def crc_seconds(payload: jax.Array) -> float:
    """CPU time of a checksum, one of many in a program."""
    many = jax.numpy.stack([payload + k for k in range(CHECKSUMS)])
    crc, took = jax.jit(functools.partial(jax.lax.map, device_crc32)), []
    crc(many).block_until_ready()
    for _ in range(30):
        started = time.process_time()
        crc(many).block_until_ready()
        took.append((time.process_time() - started) / CHECKSUMS)
    return statistics.median(took)


def quartiles(values: list[float]) -> str:
    """The median, and where the middle half lies."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    # Each case compiles the same model and loss in its own way.
    warnings.filterwarnings("ignore", message="the same program was compiled")
    cpu: dict[str, list[float]] = {name: [] for name in CASES}
    wall: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        cases = {
            name: Case(name, arguments, Path(scratch) / str(k))
            for k, (name, arguments) in enumerate(CASES.items())
        }
        for name in SAVES:
            stack.callback(cases[name].snapshots.close)
        for case in cases.values():
            case.step()
            case.snapshots.wait()
        for _ in range(options.rounds):
            for name, case in cases.items():
                before = time.process_time(), time.perf_counter()
                for _ in range(STEPS):
                    case.step()
                case.snapshots.wait()
                wall[name].append((time.perf_counter() - before[1]) / STEPS)
                cpu[name].append((time.process_time() - before[0]) / STEPS)
        payload = cases["plain"].payload
        crc, size = crc_seconds(payload), payload.nbytes
    versions = ", ".join(f"{n} {metadata.version(n)}" for n in ("jax", "orbax-checkpoint"))
    lines = [
        "# What safety costs while nothing happens",
        "",
        f"{datetime.date.today()}. {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, {versions}. `python experiments/safety/measure.py --rounds "
        f"{options.rounds}`.",
        "",
        f"The default run of `python -m jpipe.train --mesh 4`, a step of 8 microbatches. In a "
        f"round each case takes {STEPS} steps and waits for what is written; cases in turn. "
        "Medians of the rounds, and of the ratios within a round, with the quartiles of these.",
        "",
        "| step | CPU time | over plain | wall time | over plain |",
        "|---|---|---|---|---|",
    ]
    for name in CASES:
        cells = [
            cell
            for took in (cpu, wall)
            for cell in (
                f"{statistics.median(took[name]) * 1e3:,.0f} ms",
                quartiles([a / b for a, b in zip(took[name], took["plain"], strict=True)]),
            )
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"A checksum of what a stage sends, {size / 1e3:,.0f} kB, takes {crc * 1e3:.3f} ms of CPU "
        "time; each microbatch has two at each link and direction, one where it is sent and one "
        "where it is read. A snapshot within a step writes the whole state and all that stages "
        "hold, whatever a step takes: its share falls as steps get longer.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (FOLDER / "RESULTS.md").write_text(text)


if __name__ == "__main__":
    main()
