"""The three phases of 1F1B: warm-up, steady, cool-down."""

import enum

import numpy as np
from numpy.typing import NDArray

from jpipe.schedule.table import Op, Schedule


class Phase(enum.IntEnum):
    """Only forwards, forwards and backwards in turn, or only backwards."""

    WARM_UP = 0
    STEADY = 1
    COOL_DOWN = 2

    @property
    def label(self) -> str:
        """What pictures call it."""
        return self.name.lower().replace("_", "-")


def find_phases(schedule: Schedule) -> NDArray[np.int8]:
    """Find the phase of each stage in each tick.

    Warm-up lasts until the first backward of the stage, cool-down begins after its last forward.
    If all forwards lie before all backwards, as in GPipe, nothing is steady; without a backward
    everything is warm-up.

    Returns:
        int8 `[ticks, stages]`, values of `Phase`.
    """
    return _classify(schedule.op == Op.FORWARD, schedule.op == Op.BACKWARD)


def find_pipeline_phases(schedule: Schedule) -> NDArray[np.int8]:
    """Find the phase of the whole pipeline in each tick, as if it were one stage.

    Returns:
        int8 `[ticks]`, values of `Phase`.
    """
    forward, backward = schedule.op == Op.FORWARD, schedule.op == Op.BACKWARD
    return _classify(forward.any(axis=1), backward.any(axis=1))


def _classify(forward: NDArray[np.bool_], backward: NDArray[np.bool_]) -> NDArray[np.int8]:
    no_backward_yet = np.cumsum(backward, axis=0) == 0
    forwards_to_come = np.cumsum(forward[::-1], axis=0)[::-1] > 0
    later = np.where(forwards_to_come, Phase.STEADY, Phase.COOL_DOWN)
    return np.where(no_backward_yet, Phase.WARM_UP, later).astype(np.int8)
