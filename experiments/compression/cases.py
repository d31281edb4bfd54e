"""What is compared: one GPT, trained with gradients or momentum that travel in different ways."""

import dataclasses
import math
from typing import Any

import numpy as np

from jpipe.models import GPTConfig

STAGES, REPLICAS = 2, 4
CONFIG = GPTConfig(context=64, layers=4, width=64, heads=4)
MICROBATCHES, MICROBATCH = 4, 8
RATES = (0.002, 0.008)  # what the command has by default, and the best for float32
SMOOTH = 20  # steps of a running mean
CLOSE = 0.02  # of a loss: the goal of a compression

AUTO = "auto"  # freeze once the variance is stable
NEVER = math.inf
ONEBIT_ADAM = "onebit-adam"


@dataclasses.dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        method: as the command's `--compression`.
        rate: highest learning rate.
        freeze: share of the steps until `onebit-adam` compresses, `NEVER` or `AUTO`; None for what
            the command has.
        b2: decay of the variance of `onebit-adam`; None for what the command has.
        block_size: numbers that share a scale; None for the default.
        rank: columns of a factor of `powersgd`; None for the default.
        seed: of parameters and data.
    """

    method: str
    rate: float
    freeze: float | str | None = None
    b2: float | None = None
    block_size: int | None = None
    rank: int | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """The method with what is not as the command has it."""
        notes = []
        if isinstance(self.freeze, str):
            notes.append("frozen once stable")
        elif self.freeze is not None:
            never = self.freeze == NEVER
            notes.append("never frozen" if never else f"frozen after {self.freeze:.0%}")
        notes += [
            f"{label} {value}"
            for label, value in (
                ("b2", self.b2),
                ("block", self.block_size),
                ("rank", self.rank),
                ("seed", self.seed or None),
            )
            if value is not None
        ]
        return ", ".join([f"`{self.method}`", *notes])

    @property
    def beside(self) -> "Case":
        """The training that it is held against."""
        return Case("none", self.rate, seed=self.seed)


METHODS = ["none", "bf16", "fp16", "int8", "onebit", "powersgd", ONEBIT_ADAM]
MAIN = [Case(method, rate) for rate in RATES for method in METHODS]
NONE = [
    *(Case("none", rate) for rate in (0.004, 0.016)),
    *(Case(method, RATES[1], seed=1) for method in ("none", ONEBIT_ADAM)),
]
FINER = [
    *(Case("onebit", RATES[0], block_size=size) for size in (64, 8)),
    *(Case("powersgd", rate, rank=rank) for rate in RATES for rank in (4, 16)),
]
FREEZING = [
    *(
        Case(ONEBIT_ADAM, rate, freeze=freeze)
        for rate in RATES
        for freeze in (0.01, 0.05, 0.1, 0.4, NEVER)
    ),
    Case(ONEBIT_ADAM, RATES[1], freeze=AUTO),
    *(Case(ONEBIT_ADAM, RATES[1], b2=b2) for b2 in (0.95, 0.999)),
]


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a training.

    Attributes:
        losses: of each step.
        validation: loss at the end.
        bytes_first: that a device sends over `data` in the first step.
        bytes_last: the same in the last step.
        frozen_at: step after which `onebit-adam` compressed; None if it never did, or for others.
        seconds: that it took.
    """

    losses: list[float]
    validation: float
    bytes_first: float
    bytes_last: float
    frozen_at: int | None
    seconds: float

    @property
    def smooth(self) -> Any:
        """Running mean of the losses."""
        return np.convolve(self.losses, np.ones(SMOOTH) / SMOOTH, "valid")

    @property
    def bytes_a_step(self) -> float:
        """Mean over the run."""
        warm_up = (self.frozen_at or 0) / len(self.losses)
        return warm_up * self.bytes_first + (1 - warm_up) * self.bytes_last
