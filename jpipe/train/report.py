"""What the user sees of a run."""

import itertools
import math

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jpipe
from jpipe.adapters import FlaxPipeline
from jpipe.memory import Memory, format_bytes
from jpipe.mesh import STAGE, describe_mesh
from jpipe.precision import POLICIES
from jpipe.schedule import CostModel, draw_text, simulate_schedule
from jpipe.train.options import ONEBIT_ADAM, TrainOptions
from jpipe.train.setup import Setup


def print_header(
    console: Console, setup: Setup, memory: Memory, memory_alone: Memory | None
) -> None:
    """Print what the run is, what it needs, and its schedule.

    Args:
        console: where to.
        setup: the run.
        memory: bytes per device of the pipeline's step.
        memory_alone: bytes of the same step on one device, if known.
    """
    options, task = setup.options, setup.task
    facts_of_task = task.facts()
    num_stages = setup.mesh.shape[STAGE]
    items = options.batch_size * task.items_per_example
    bubble = simulate_schedule(setup.schedule, CostModel()).bubble
    facts = {
        "jpipe": f"{jpipe.__version__}, JAX {jax.__version__}",
        "model": f"{options.model}: {setup.num_params / 1e6:.2f} million parameters, "
        + facts_of_task["model"],
        "data": facts_of_task["data"],
        "devices": setup.devices.description,
        "mesh": describe_mesh(setup.mesh.shape.values()),
        "stages": describe_split(task.model, num_stages),
        "batch": f"{options.batch_size} examples = {options.microbatches} microbatches of "
        f"{setup.microbatch_size}; {items:,} {task.item}s a step, {options.steps} steps",
        "schedule": f"{options.schedule}: bubble {bubble:.1%} of the time, if a backward takes "
        f"two forwards; recompute {options.recompute}",
        "precision": describe_precision(options),
        "memory": describe_memory(memory, memory_alone),
        "run folder": str(setup.folder.path),
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    console.print(table)
    console.print()
    picture = draw_text(setup.schedule, width=console.width)
    console.print(picture, no_wrap=True, overflow="crop")
    console.print()


def describe_precision(options: TrainOptions) -> str:
    """What is computed in which dtype, and how gradients travel, in one line."""
    policy = POLICIES[options.precision]
    computed = f"activations {policy.compute}, parameters and sums {policy.param}"
    if policy.compute != policy.norm:
        computed += f", norms, softmax and loss {policy.norm}"
    if options.precision == "fp16":
        computed += ", dynamic loss scale"
    if options.compression == "none":
        return computed
    travels = "momentum" if options.compression == ONEBIT_ADAM else "gradients"
    note = ""
    if options.compression == "onebit":
        note = f" (with AdamW {ONEBIT_ADAM} trains better)"
    return f"{computed}; {travels} over data compressed by {options.compression}{note}"


def describe_split(model: FlaxPipeline, num_stages: int) -> str:
    """Which stage has which blocks, in one line."""
    if model.split_points is None:
        each = f"{model.num_blocks // num_stages} blocks each"
        return each + (f", in {model.num_chunks} chunks" if model.num_chunks > 1 else "")
    ends = [0, *model.split_points, model.num_blocks]
    ranges = [f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in itertools.pairwise(ends)]
    if model.stage_flops is None:
        return f"blocks {', '.join(ranges)}"
    pieces = len(model.stage_flops)
    most = max(model.stage_flops) / (sum(model.stage_flops) / pieces)
    what = "stage" if pieces == num_stages else "chunk of a stage"
    return (
        f"blocks {', '.join(ranges)}, balanced by operations: the most on one {what} is "
        f"{most:.2f} times the mean"
    )


def describe_memory(pipelined: Memory, alone: Memory | None) -> str:
    """Bytes per device of the pipeline, beside the one device that would do it alone."""

    def parts(memory: Memory) -> str:
        return (
            f"{format_bytes(memory.total)} ({format_bytes(memory.state)} state, "
            f"{format_bytes(memory.temporary)} temporary)"
        )

    beside = "" if alone is None else f"; one device alone {parts(alone)}"
    return f"{parts(pipelined)} a device{beside}"


def describe_phases(seconds: dict[str, float]) -> str:
    """How long each phase of the start took, in one line."""
    return ", ".join(f"{phase} {duration:.1f} s" for phase, duration in seconds.items())


def describe_loss(nats: float, unit: str) -> str:
    """A loss in nats and bits."""
    return f"{nats:.3f} nats = {nats / math.log(2):.3f} bits per {unit}"


def make_progress(console: Console) -> Progress:
    """The progress bar; silent where output is no terminal."""
    return Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=8),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=4,
    )
