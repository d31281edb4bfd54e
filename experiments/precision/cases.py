"""What is compared: one GPT, trained in different precisions and with different loss scales."""

import dataclasses
from typing import Any

import numpy as np

from jpipe.models import GPTConfig

Tree = Any

STAGES, MICROBATCHES, MICROBATCH = 4, 8, 4
CONFIG = GPTConfig(context=64, layers=4, width=64, heads=4)
TOKENS = MICROBATCH * CONFIG.context  # of a microbatch
SMALL, SMALLER = 2.0**-8, 2.0**-12  # weights of the loss
RIGHT, LARGE, HUGE = 2.0**16, 2.0**24, 2.0**30  # scales
GROWTH_INTERVAL = 40  # steps; the default of 2000 is longer than these runs
SMOOTH = 20  # steps of a running mean
CLOSE = 0.02  # of a loss: the goal of a low precision
# XLA may leave out what rounds to float16 and back, which real hardware would not.
STRICT = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: of the row.
        precision: a name in `POLICIES`.
        weight: what the loss is multiplied by, a power of two.
        scale: the loss scale, at first; None for none.
        dynamic: whether steps that overflow are skipped and the scale changes.
        sums: dtype of the sums over microbatches; float16 is not what jpipe does.
        seed: of parameters and data.
    """

    name: str
    precision: str
    weight: float = 1.0
    scale: float | None = None
    dynamic: bool = True
    sums: str = "float32"
    seed: int = 0


CASES = [
    Case("fp32", "fp32"),
    Case("fp32, another seed", "fp32", seed=1),
    Case("bf16", "bf16"),
    Case("fp16, dynamic scale", "fp16", scale=RIGHT),
    Case("fp16, dynamic scale, begun at 2^30", "fp16", scale=HUGE),
    Case("fp16, no scale", "fp16"),
    Case("fp16, constant 2^16", "fp16", scale=RIGHT, dynamic=False),
    Case("fp16, constant 2^16, sums in fp16", "fp16", scale=RIGHT, dynamic=False, sums="float16"),
    Case("fp16, constant 2^24", "fp16", scale=LARGE, dynamic=False),
    *(
        Case(name, precision, weight, scale)
        for weight in (SMALL, SMALLER)
        for name, precision, scale in (
            ("fp32", "fp32", None),
            ("bf16", "bf16", None),
            ("fp16, dynamic scale", "fp16", RIGHT),
            ("fp16, no scale", "fp16", None),
        )
    ),
]


@dataclasses.dataclass(frozen=True)
class Curve:
    """What came of a training.

    Attributes:
        losses: of each step, without the weight, up to the first that is not finite.
        scales: the loss scale in each step.
        skipped: steps whose gradients overflowed and were left out.
        skipped_first: how many of these came before the first that was not.
        validation: loss at the end, without the weight.
        params: at the end.
    """

    losses: list[float]
    scales: list[float]
    skipped: int
    skipped_first: int
    validation: float
    params: Tree

    @property
    def smooth(self) -> np.ndarray:
        """Running mean of the losses."""
        return np.convolve(self.losses, np.ones(SMOOTH) / SMOOTH, "valid")
