"""From options to everything a run needs. What cannot work is refused here, before any compile."""

import dataclasses
import platform
from importlib import metadata
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

import jpipe
from jpipe.adapters import FlaxPipeline, pipeline_from_nnx
from jpipe.data import TokenBatches, Tokens, Validation, load_tokens, validation_windows
from jpipe.mesh import DATA, STAGE, make_mesh, parse_mesh
from jpipe.models import GPT, GPTConfig
from jpipe.pipeline import Params
from jpipe.pipeline.checks import check_blocks
from jpipe.schedule import Schedule, check_schedule, make_schedule
from jpipe.train.devices import Devices, choose_devices
from jpipe.train.optimizer import make_optimizer
from jpipe.train.options import TrainOptions
from jpipe.train.run_folder import RunFolder


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """Everything a run needs.

    Attributes:
        options: what the user asked for.
        devices: the devices.
        mesh: the mesh over them.
        tokens: the text.
        batches: training batches.
        validation: what the run is judged on.
        config: sizes of the model.
        model: the model as stages.
        schedule: the checked table.
        optimizer: the optimizer.
        folder: where the run writes to.
    """

    options: TrainOptions
    devices: Devices
    mesh: Mesh
    tokens: Tokens
    batches: TokenBatches
    validation: Validation
    config: GPTConfig
    model: FlaxPipeline
    schedule: Schedule
    optimizer: optax.GradientTransformation
    folder: RunFolder

    def init(self) -> Params:
        """Fresh parameters, the same on every mesh; to be traced."""
        return self.model.init(nnx.Rngs(self.options.seed))

    @property
    def num_params(self) -> int:
        """Numbers in the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(self.init)))

    @property
    def unit(self) -> str:
        """What one id of the text stands for."""
        return "byte" if self.tokens.is_bytes else "token"


def prepare(options: TrainOptions) -> Setup:
    """Prepare a run.

    Raises:
        ValueError: if anything asked for cannot work, naming the argument, its value and what to
            do about it.
    """
    axes = parse_mesh(options.mesh)
    num_stages, num_data = axes[STAGE], axes[DATA]
    try:
        check_blocks(options.layers, num_stages)
    except ValueError as error:
        raise ValueError(f"--mesh {options.mesh}: {error}") from error
    microbatch_size = _microbatch_size(options, num_data)
    schedule = make_schedule(options.schedule, num_stages, options.microbatches)
    check_schedule(schedule)
    tokens = load_tokens(options.data, options.vocab_size)
    config = GPTConfig(
        vocab_size=tokens.vocab_size,
        context=options.context,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
    )
    batches = TokenBatches(
        tokens.train, context=options.context, microbatch_size=microbatch_size, seed=options.seed
    )
    validation = validation_windows(
        tokens.validation, context=options.context, microbatch_size=microbatch_size
    )
    devices = choose_devices(num_stages * num_data, options.platform)
    mesh = make_mesh(num_stages, num_data, devices=devices.devices)
    model = pipeline_from_nnx(
        lambda rngs: GPT(config, rngs=rngs),
        stem="embedding",
        body="blocks",
        head="head",
        recompute=options.recompute,
    )
    return Setup(
        options=options,
        devices=devices,
        mesh=mesh,
        tokens=tokens,
        batches=batches,
        validation=validation,
        config=config,
        model=model,
        schedule=schedule,
        optimizer=make_optimizer(options.learning_rate, options.steps),
        folder=RunFolder(options.out, options.model, _config(options, devices)),
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
