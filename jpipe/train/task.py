"""What a run learns: model, loss and data, behind one interface for all kinds."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh

from jpipe.adapters import FlaxPipeline, pipeline_from_nnx
from jpipe.mesh import STAGE
from jpipe.pipeline import Loss, Params
from jpipe.train.options import TrainOptions

Tree = Any


class Yardstick(NamedTuple):
    """A simple model fitted on the same training data.

    Attributes:
        name: what it is.
        loss: its validation loss, in nats.
    """

    name: str
    loss: float


class Task(Protocol):
    """What a run learns.

    Attributes:
        model: the model as stages, once it is placed.
        loss: what is minimized.
        item: what the loss is per, in the singular.
        items_per_example: how many of these are in an example.
        inputs: shape and dtype of the inputs of one microbatch.
        targets: the same of its targets.
        validation: inputs and targets to judge the run on, `[M, microbatch, ...]` arrays.
    """

    model: FlaxPipeline
    loss: Loss
    item: str
    items_per_example: int
    inputs: jax.ShapeDtypeStruct
    targets: jax.ShapeDtypeStruct
    validation: tuple[Any, Any]

    def init(self) -> Any:
        """Fresh variables, the same on every mesh; to be traced."""

    def place(self, mesh: Mesh, rows: range) -> None:
        """Cut the model for a mesh, and read these rows of each microbatch only."""

    def next_step(self) -> tuple[Any, Any]:
        """Inputs and targets of the next step: `[M, rows of this process, ...]` arrays."""

    def facts(self) -> dict[str, str]:
        """What to say of model and data."""

    def yardstick(self) -> Yardstick:
        """What to compare the validation loss with."""

    def show(self, mesh: Mesh, params: Params) -> tuple[str, str, str] | None:
        """A title and two texts to show at the end, one given and one made by the model, if any."""


def cut(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    options: TrainOptions,
    mesh: Mesh,
    inputs: jax.ShapeDtypeStruct,
    *,
    stem: str,
) -> FlaxPipeline:
    """A model of the command as stages."""
    return pipeline_from_nnx(
        make_model,
        stem=stem,
        body="blocks",
        head="head",
        recompute=options.recompute,
        num_stages=mesh.shape[STAGE],
        inputs=inputs,
    )
