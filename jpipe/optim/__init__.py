"""optax transformations for low precision, and for gradients that travel compressed."""

from jpipe.optim.all_reduce import compressed_all_reduce, wants_gradient_of_each_replica
from jpipe.optim.loss_scale import (
    LossScaleError,
    LossScaleState,
    check_loss_scale,
    dynamic_loss_scale,
    loss_scale,
    loss_scale_state,
)
from jpipe.optim.onebit_adam import OneBitAdamState, onebit_adam, scale_by_onebit_adam
from jpipe.optim.per_device import PerDevice
from jpipe.optim.reduction import Method, Reduction, ReductionState
from jpipe.optim.two_stage import Feedback

__all__ = [
    "Feedback",
    "LossScaleError",
    "LossScaleState",
    "Method",
    "OneBitAdamState",
    "PerDevice",
    "Reduction",
    "ReductionState",
    "check_loss_scale",
    "compressed_all_reduce",
    "dynamic_loss_scale",
    "loss_scale",
    "loss_scale_state",
    "onebit_adam",
    "scale_by_onebit_adam",
    "wants_gradient_of_each_replica",
]
