"""The options of the command, and what the command line says of them."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

from jpipe.cli import Parser, argument, number, whole_number
from jpipe.optim import Method
from jpipe.pipeline import Recompute
from jpipe.precision import POLICIES
from jpipe.schedule import SCHEDULES
from jpipe.schedule.registry import schedule_named
from jpipe.watchdog import LEAST


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Everything a run depends on, with the command's defaults.

    Attributes:
        mesh: devices as stages x data x model, such as `4`, `4x2` or `2x2x2`.
        model: which model.
        layers: number of blocks of a GPT.
        width: features per token of a GPT; channels of the first blocks of a ResNet.
        heads: attention heads.
        context: tokens an example predicts.
        tied: whether the head of a GPT projects by the matrix of its embedding.
        data: for a GPT text or token files; none for English text that ships inside Python. For a
            ResNet one file of images; none for handwritten digits.
        vocab_size: size of the vocabulary; 256 for text.
        steps: optimizer updates.
        batch_size: examples of a step, over all devices.
        microbatches: microbatches of a step.
        schedule: name of the pipeline schedule, or a `.csv` file with a table.
        chunks: chunks of the model on each stage; None for 2 of `interleaved` and `zero-bubble-v`,
            what a table has, 1
            of others.
        precision: what is computed in which dtype, see `jpipe.precision.POLICIES`; `fp16` with
            dynamic loss scaling.
        compression: how gradients travel over `data`: `none`, a method of
            `jpipe.optim.compressed_all_reduce`, or `onebit-adam`, where momentum does.
        freeze_step: steps of `onebit-adam` until momentum travels compressed; None for a fifth of
            all.
        recompute: what the backward computes again instead of keeping it.
        learning_rate: highest learning rate.
        seed: decides parameters, order of the data and the sample.
        eval_every: steps between validations; 0 for one at the end only.
        snapshot_every_steps: steps between snapshots, of which the last is that of the last step; 0
            for none.
        snapshot_every_microbatches: microbatches between snapshots within a step; None for none.
        keep_snapshots: how many of the newest stay.
        keep_every: of the others those stay whose step is a multiple of this; None for none.
        snapshot_errors: whether the run is to `end` or to `go-on` if a snapshot cannot be written.
        resume: `auto` to go on in a run folder that holds a run, `never`, or the folder of another
            run or snapshot to go on from.
        max_restarts: how often in a row, without a new snapshot, the run is started again if it
            dies; 0 to let it die.
        comm_timeout: seconds that a step, or a wait for another process, may take before the run
            counts as stuck; 0 for any time.
        verify_comm: whether what stages send each other carries a checksum, which is compared.
        out: run folder; None for a new one below `runs/`.
        platform: `auto`, `cpu`, `gpu` or `tpu`.
        dry_run: compile, report and stop.
        distributed: whether to join other processes that JAX finds by itself.
        coordinator: `host:port` of process 0, to join others without JAX finding them.
        num_processes: how many processes there are.
        process_id: which of them this is.
    """

    mesh: str = "4"
    model: str = "gpt"
    layers: int = 8
    width: int = 128
    heads: int = 4
    context: int = 128
    tied: bool = False
    data: tuple[str, ...] = ()
    vocab_size: int | None = None
    steps: int = 600
    batch_size: int = 16
    microbatches: int = 8
    schedule: str = "1f1b"
    chunks: int | None = None
    precision: str = "fp32"
    compression: str = "none"
    freeze_step: int | None = None
    recompute: Recompute = "none"
    learning_rate: float = 2e-3
    seed: int = 0
    eval_every: int = 100
    snapshot_every_steps: int = 100
    snapshot_every_microbatches: int | None = None
    keep_snapshots: int = 3
    keep_every: int | None = None
    snapshot_errors: str = "end"
    resume: str = "auto"
    max_restarts: int = 0
    comm_timeout: float = 600.0
    verify_comm: bool = False
    out: str | None = None
    platform: str = "auto"
    dry_run: bool = False
    distributed: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


RESNETS = {"resnet18": 18, "resnet34": 34, "resnet50": 50, "resnet101": 101, "resnet152": 152}
"""Models that learn images, and their number of layers."""

ONEBIT_ADAM = "onebit-adam"
"""The compression that is an optimizer of its own."""

FREE = frozenset(
    """
    mesh data steps microbatches schedule chunks recompute eval_every snapshot_every_steps
    snapshot_every_microbatches keep_snapshots keep_every snapshot_errors resume max_restarts
    comm_timeout verify_comm out platform dry_run distributed coordinator num_processes process_id
    """.split()
)
"""Options in which a run may differ from the one that it goes on with. Of the data it is not the
name that counts, but what is in it: see `jpipe.data.ShuffledBatches.set_state`."""
FREE_IF_NAMED = frozenset({"learning_rate", "freeze_step"})
"""Options that may differ as well where `--resume` names what to go on from."""

_IMAGE_DEFAULTS = {"width": 64, "steps": 100, "batch_size": 64, "eval_every": 20}


def parse_options(argv: Sequence[str] | None = None) -> TrainOptions:
    """Read the command line.

    Args:
        argv: the arguments; None for those of the process.

    Raises:
        ValueError: if an argument is unknown, missing its value, or out of range.
    """
    default = TrainOptions(**_own_defaults(argv))
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

    add(
        "--mesh",
        "devices: 4 (stages), 4x2 (stages x data), 2x2x2 (stages x data x model), stage=4,data=2",
        metavar="MESH",
    )
    add("--model", "which model to train", choices=["gpt", *RESNETS])
    add("--layers", "blocks of a GPT", type=positive, metavar="N")
    add("--width", "features per token, or channels at first", type=positive, metavar="N")
    add("--heads", "attention heads of a GPT", type=positive, metavar="N")
    add("--context", "tokens an example predicts", type=positive, metavar="N")
    add("--tied", "project by the matrix of the embedding", action="store_true")
    add(
        "--data",
        "text files, read as bytes, or token files (.npy, .bin); none for English text that ships "
        "inside Python. For a ResNet an .npz file with images and labels; none for handwritten "
        "digits",
        nargs="+",
        metavar="FILE",
    )
    add("--vocab-size", "number of different tokens; 256 for text", type=positive, metavar="N")
    add("--steps", "optimizer updates", type=whole_number(0), metavar="N")
    add("--batch-size", "examples of a step, over all devices", type=positive, metavar="N")
    add("--microbatches", "microbatches of a step", type=positive, metavar="N")
    add(
        "--schedule",
        f"pipeline schedule: {', '.join(SCHEDULES)}, or a .csv file with a table",
        type=argument(schedule_named),
        metavar="NAME",
    )
    add(
        "--chunks",
        "chunks of the model on each stage; none for 2 of interleaved and zero-bubble-v, else 1",
        type=positive,
        metavar="V",
    )
    add(
        "--precision",
        "what activations are computed in; fp16 with dynamic loss scaling",
        choices=list(POLICIES),
    )
    add(
        "--compression",
        "how gradients travel over data; with onebit-adam momentum does",
        choices=[*get_args(Method), ONEBIT_ADAM],
    )
    add(
        "--freeze-step",
        "steps of onebit-adam until momentum travels compressed; none for a fifth of all",
        type=positive,
        metavar="N",
    )
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
    add(
        "--snapshot-every-steps",
        "steps between snapshots; 0 for none",
        type=whole_number(0),
        metavar="N",
    )
    add(
        "--snapshot-every-microbatches",
        "microbatches between snapshots within a step; none for none",
        type=positive,
        metavar="N",
    )
    add("--keep-snapshots", "how many of the newest stay", type=positive, metavar="N")
    add(
        "--keep-every",
        "of the others keep those whose step is a multiple of this; none for none",
        type=positive,
        metavar="N",
    )
    add(
        "--snapshot-errors",
        "what to do if a snapshot cannot be written",
        choices=["end", "go-on"],
    )
    add(
        "--resume",
        "auto: go on with the run in --out; never; or the folder of a run or snapshot to go on "
        "from",
        metavar="auto|never|FOLDER",
    )
    add(
        "--max-restarts",
        "how often in a row, without a new snapshot, to start again what died; 0 for never",
        type=whole_number(0),
        metavar="N",
    )
    add(
        "--comm-timeout",
        "seconds that a step, or a wait for another process, may take before the run is ended as "
        f"stuck, at least {LEAST}; 0 for any time",
        type=argument(_timeout),
        metavar="SECONDS",
    )
    add(
        "--verify-comm",
        "send a CRC32 with what goes from stage to stage, compare it, and repeat what was damaged",
        action="store_true",
    )
    add("--out", "run folder; none for a new one below runs/", metavar="FOLDER")
    add("--platform", "devices to use", choices=["auto", "cpu", "gpu", "tpu"])
    add("--dry-run", "compile, report memory and schedule, stop", action="store_true")
    add("--distributed", "join other processes, on SLURM and the like", action="store_true")
    add("--coordinator", "join them by hand: address of process 0", metavar="HOST:PORT")
    add(
        "--num-processes",
        "how many processes there are; alone: start them here, with --platform cpu",
        type=positive,
        metavar="N",
    )
    add("--process-id", "which of them this is, from 0", type=whole_number(0), metavar="N")
    values = vars(parser.parse_args(argv))
    return TrainOptions(**{**values, "data": tuple(values["data"])})


def _timeout(text: str) -> float:
    seconds = number(above=False)(text)
    if 0 < seconds < LEAST:
        raise ValueError(f"{text!r} must be at least {LEAST} s, or 0 for any time")
    return seconds


def _own_defaults(argv: Sequence[str] | None) -> dict[str, Any]:
    """Defaults of the model that the command line names."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--model")
    try:
        model = first.parse_known_args(argv)[0].model
    except argparse.ArgumentError:  # said by the real parser
        return {}
    return dict(_IMAGE_DEFAULTS) if model in RESNETS else {}
