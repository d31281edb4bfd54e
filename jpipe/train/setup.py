"""From options to everything a run needs. What cannot work is refused here, before any compile."""

import dataclasses
import json
import platform
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import jpipe
from jpipe.mesh import DATA, MODEL, STAGE, make_mesh, parse_mesh
from jpipe.pipeline import Params, param_specs
from jpipe.pipeline.checks import check_trains
from jpipe.processes import of_main, own_rows
from jpipe.schedule import Schedule, check_schedule
from jpipe.schedule.registry import load_schedule
from jpipe.snapshot import Snapshot
from jpipe.targets import compiler_options
from jpipe.train.devices import Devices, choose_devices
from jpipe.train.language import LanguageTask
from jpipe.train.optimizer import make_optimizer
from jpipe.train.options import ONEBIT_ADAM, RESNETS, TrainOptions
from jpipe.train.resume import check_same, find_snapshot
from jpipe.train.run_folder import SUMMARY, RunFolder, holds_run
from jpipe.train.task import Task
from jpipe.train.vision import VisionTask
from jpipe.watchdog import APART, Watchdog


@dataclasses.dataclass(eq=False)
class Setup:
    """Everything a run needs.

    Attributes:
        options: what the user asked for.
        devices: the devices.
        mesh: the mesh over them.
        microbatch_size: examples of a microbatch, over all devices.
        rows: which of these this process reads.
        task: model, loss and data.
        schedule: the checked table.
        optimizer: the optimizer.
        optimizer_alone: the same on one device, where nothing travels.
        folder: where the run writes to.
        snapshot: what to go on from; None to begin anew, and once it has been restored.
    """

    options: TrainOptions
    devices: Devices
    mesh: Mesh
    microbatch_size: int
    rows: range
    task: Task
    schedule: Schedule
    optimizer: optax.GradientTransformation
    optimizer_alone: optax.GradientTransformation
    folder: RunFolder
    snapshot: Snapshot | None

    @property
    def num_params(self) -> int:
        """Numbers in the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(_params(self.task)))

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile a program with the options that jpipe recommends for these devices.

        A jaxlib that has dropped one of them compiles without any, and a warning says so.
        """
        options = compiler_options(self.mesh.devices.flat[0].platform)
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if not options or "No such compile option" not in str(error):
                raise
            warnings.warn(f"compiled with XLA's defaults: {error}", stacklevel=2)
            return lowered.compile()


def prepare(options: TrainOptions, watchdog: Watchdog) -> Setup:
    """Prepare a run.

    Args:
        options: what the user asks for.
        watchdog: watches over what waits for other processes.

    Raises:
        ValueError: if anything asked for cannot work, naming the argument, its value and what to
            do about it.
    """
    axes = parse_mesh(options.mesh)
    num_stages = axes[STAGE]
    microbatch_size = _microbatch_size(options, axes[DATA])
    schedule = _schedule(options, num_stages)
    pieces = num_stages * schedule.num_chunks
    if options.model == "gpt" and pieces > options.layers:
        chunks = f" of {schedule.num_chunks} chunks each" if schedule.num_chunks > 1 else ""
        most = "stages x chunks" if chunks else "stages"
        raise ValueError(
            f"--mesh {options.mesh}: {options.layers} layers cannot be cut into {num_stages} "
            f"stages{chunks}; use at most {options.layers} {most}, or more --layers"
        )
    task: Task
    if options.model in RESNETS:
        _check_images_only(options)
        task = VisionTask(options, microbatch_size)
    else:
        task = LanguageTask(options, microbatch_size)
    if options.freeze_step is not None and options.compression != ONEBIT_ADAM:
        raise ValueError(
            f"--freeze-step {options.freeze_step} is for --compression {ONEBIT_ADAM}, not "
            f"{options.compression}; leave it out"
        )
    devices = choose_devices(axes, options)
    mesh = make_mesh(num_stages, axes[DATA], axes[MODEL], devices=devices.devices)
    _check_processes(mesh)
    rows = own_rows(mesh, microbatch_size)
    task.place(mesh, schedule.num_chunks)
    _check_apart(options, mesh, task)
    with watchdog.watch_others("finding where to go on", APART):
        snapshot = find_snapshot(options)  # uses JAX, so not before its devices are chosen
    _check_finished(options, snapshot)
    if snapshot is not None:
        _set_cursor(task, snapshot)
    specs = param_specs(mesh, _params(task), task.model.stages.partition)  # or refuses
    with watchdog.watch_others("opening the run folder", APART):
        folder = _open_folder(options, devices, snapshot)
    return Setup(
        options=options,
        devices=devices,
        mesh=mesh,
        microbatch_size=microbatch_size,
        rows=rows,
        task=task,
        schedule=schedule,
        optimizer=make_optimizer(options, mesh, specs),
        optimizer_alone=make_optimizer(options),
        folder=folder,
        snapshot=snapshot,
    )


def _open_folder(options: TrainOptions, devices: Devices, snapshot: Snapshot | None) -> RunFolder:
    """The run folder; if it cannot be had, every process says why."""
    opened: list[RunFolder] = []

    def of_this_run() -> str:
        goes_on = _goes_on(options, snapshot)
        folder = RunFolder(
            options.out,
            options.model,
            _config(options, devices),
            writable=not (goes_on and options.dry_run),
            goes_on=goes_on,
        )
        opened.append(folder)
        return str(folder.path)

    path = of_main(of_this_run)
    return opened[0] if opened else RunFolder(path, options.model, {}, writable=False)


def _check_finished(options: TrainOptions, snapshot: Snapshot | None) -> None:
    """Refuse to go on with what has nothing left to do."""
    if snapshot is None:
        return
    step, folder = snapshot.manifest.step, snapshot.path.parent.parent
    if step > options.steps or (step == options.steps and (folder / SUMMARY).exists()):
        raise ValueError(
            f"{snapshot.path} was taken after {step} steps, and --steps is {options.steps}: "
            "nothing is left to do; use more --steps, or another --out"
        )


def _goes_on(options: TrainOptions, snapshot: Snapshot | None) -> bool:
    """Whether the run folder may hold a run: this one, up to a snapshot or before the first."""
    if options.resume == "never" or options.out is None:
        return False
    folder = Path(options.out).expanduser()
    if snapshot is not None and snapshot.path.parent.parent.resolve() == folder.resolve():
        return True
    if not holds_run(folder) or (folder / SUMMARY).exists():
        return False
    try:
        before = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(before, dict):
        return False
    check_same(options, before, str(folder))
    return True


def _check_apart(options: TrainOptions, mesh: Mesh, task: Task) -> None:
    """Refuse to look into a step where there is no within, or XLA holds what is in it."""
    every = options.snapshot_every_microbatches
    if every is not None and every >= options.microbatches:
        raise ValueError(
            f"--snapshot-every-microbatches {every} must be below --microbatches "
            f"{options.microbatches}, for there to be one within a step"
        )
    within = [] if every is None else [f"--snapshot-every-microbatches {every}"]
    asked = " and ".join(within + ["--verify-comm"] * options.verify_comm)
    if not asked:
        return
    has_state = not isinstance(jax.eval_shape(task.init), Params)
    divided = mesh.shape[DATA] > 1 and has_state and options.compression == "none"
    if mesh.shape[MODEL] > 1 or divided:
        raise ValueError(
            f"{asked}: every device must run a program of its own, but on --mesh {options.mesh} "
            f"XLA divides the work of --model {options.model}; leave it out, use a mesh of stages "
            "alone, or of stages and data with a --compression"
        )


def _set_cursor(task: Task, snapshot: Snapshot) -> None:
    """Go on in the data where the snapshot was taken."""
    try:
        task.batches.set_state(snapshot.manifest.extra["data"])
    except ValueError as error:
        raise ValueError(f"{snapshot.path} belongs to other data: {error}") from error


def _params(task: Task) -> Params:
    """Shapes and dtypes of a model's parameters."""
    made: Any = jax.eval_shape(task.init)
    return made if isinstance(made, Params) else made[0]


def _schedule(options: TrainOptions, num_stages: int) -> Schedule:
    """The table, proved right."""
    try:
        schedule = load_schedule(options.schedule, num_stages, options.microbatches, options.chunks)
        check_schedule(schedule)
        check_trains(schedule)
    except ValueError as error:
        chunks = "" if options.chunks is None else f" --chunks {options.chunks}"
        raise ValueError(f"--schedule {options.schedule}{chunks}: {error}") from error
    return schedule


def _check_images_only(options: TrainOptions) -> None:
    """Refuse options that mean nothing to a model of images."""
    default = TrainOptions()
    for name in ("layers", "heads", "context", "tied", "vocab_size"):
        if getattr(options, name) != getattr(default, name):
            raise ValueError(
                f"--{name.replace('_', '-')} is for --model gpt; leave it out for {options.model}"
            )


def _check_processes(mesh: Mesh) -> None:
    """Refuse what hangs: XLA on CPUs may take exchanges along two axes in different order."""
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    if jax.process_count() > 1 and len(axes) > 1 and mesh.devices.flat[0].platform == "cpu":
        raise ValueError(
            f"a mesh with the axes {' and '.join(axes)} over {jax.process_count()} processes works "
            "on accelerators, but not on CPUs, where XLA's exchanges along two axes can wait for "
            "each other for ever; use one axis, such as --mesh 4 or --mesh 1x4, or one process"
        )


def _microbatch_size(options: TrainOptions, num_data: int) -> int:
    """Examples in a microbatch, over all devices of the `data` axis."""
    shares = options.microbatches * num_data
    if options.batch_size % shares:
        below = options.batch_size - options.batch_size % shares
        fitting = f"{below} or {below + shares}" if below else f"{shares}"
        raise ValueError(
            f"--batch-size {options.batch_size} must be divisible by microbatches x data = "
            f"{options.microbatches} x {num_data} = {shares}; use {fitting}, or other "
            "--microbatches"
        )
    return options.batch_size // options.microbatches


def _config(options: TrainOptions, devices: Devices) -> dict[str, Any]:
    """What config.json says: enough to run the same again."""
    versions = {name: metadata.version(name) for name in ("jax", "flax", "optax", "grain", "numpy")}
    return {
        **dataclasses.asdict(options),
        "devices": devices.description,
        "versions": {"jpipe": jpipe.__version__, "python": platform.python_version(), **versions},
    }
