"""The options of the command, and what the command line says of them."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import get_args

from jpipe.cli import Parser, number, whole_number
from jpipe.pipeline import Recompute
from jpipe.schedule import SCHEDULES


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Everything a run depends on, with the command's defaults.

    Attributes:
        mesh: devices as stages x data, such as `4` or `4x2`.
        model: which model.
        layers: number of blocks.
        width: features per token.
        heads: attention heads.
        context: tokens an example predicts.
        data: text or token files; none for English text that ships inside Python.
        vocab_size: size of the vocabulary; 256 for text.
        steps: optimizer updates.
        batch_size: examples of a step, over all devices.
        microbatches: microbatches of a step.
        schedule: name of the pipeline schedule.
        recompute: what the backward computes again instead of keeping it.
        learning_rate: highest learning rate.
        seed: decides parameters, order of the data and the sample.
        eval_every: steps between validations; 0 for one at the end only.
        out: run folder; None for a new one below `runs/`.
        platform: `auto`, `cpu`, `gpu` or `tpu`.
        dry_run: compile, report and stop.
    """

    mesh: str = "4"
    model: str = "gpt"
    layers: int = 8
    width: int = 128
    heads: int = 4
    context: int = 128
    data: tuple[str, ...] = ()
    vocab_size: int | None = None
    steps: int = 600
    batch_size: int = 16
    microbatches: int = 8
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    learning_rate: float = 2e-3
    seed: int = 0
    eval_every: int = 100
    out: str | None = None
    platform: str = "auto"
    dry_run: bool = False


def parse_options(argv: Sequence[str] | None = None) -> TrainOptions:
    """Read the command line.

    Args:
        argv: the arguments; None for those of the process.

    Raises:
        ValueError: if an argument is unknown, missing its value, or out of range.
    """
    default = TrainOptions()
    parser = Parser(
        prog="python -m jpipe.train",
        description="Train a model by pipeline parallelism.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    positive = whole_number(1)

    def add(name: str, meaning: str, **settings: object) -> None:
        field = name.removeprefix("--").replace("-", "_")
        parser.add_argument(name, help=meaning, default=getattr(default, field), **settings)  # type: ignore[arg-type]

    add("--mesh", "devices: 4 (stages), 4x2 (stages x data), stage=4,data=2", metavar="MESH")
    add("--model", "which model to train", choices=["gpt"])
    add("--layers", "blocks of the model; a multiple of the stages", type=positive, metavar="N")
    add("--width", "features per token", type=positive, metavar="N")
    add("--heads", "attention heads", type=positive, metavar="N")
    add("--context", "tokens an example predicts", type=positive, metavar="N")
    add(
        "--data",
        "text files, read as bytes, or token files (.npy, .bin); "
        "none for English text that ships inside Python",
        nargs="+",
        metavar="FILE",
    )
    add("--vocab-size", "number of different tokens; 256 for text", type=positive, metavar="N")
    add("--steps", "optimizer updates", type=whole_number(0), metavar="N")
    add("--batch-size", "examples of a step, over all devices", type=positive, metavar="N")
    add("--microbatches", "microbatches of a step", type=positive, metavar="N")
    add("--schedule", "pipeline schedule", choices=list(SCHEDULES))
    add(
        "--recompute",
        "what the backward computes again instead of keeping it from the forward",
        choices=list(get_args(Recompute)),
    )
    add("--learning-rate", "highest learning rate", type=number(above=True), metavar="RATE")
    add("--seed", "decides parameters, order of data, sample", type=whole_number(0), metavar="N")
    add(
        "--eval-every",
        "steps between validations; 0 for one at the end only",
        type=whole_number(0),
        metavar="N",
    )
    add("--out", "run folder; none for a new one below runs/", metavar="FOLDER")
    add("--platform", "devices to use", choices=["auto", "cpu", "gpu", "tpu"])
    add("--dry-run", "compile, report memory and schedule, stop", action="store_true")
    values = vars(parser.parse_args(argv))
    return TrainOptions(**{**values, "data": tuple(values["data"])})
