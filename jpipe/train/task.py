"""What a run learns: model, loss and data, behind one interface for all kinds."""

import abc
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from jpipe.adapters import FlaxPipeline, pipeline_from_nnx
from jpipe.data.shuffled import ShuffledBatches
from jpipe.mesh import STAGE
from jpipe.pipeline import Loss, Params
from jpipe.train.options import TrainOptions


class Yardstick(NamedTuple):
    """A simple model fitted on the same training data.

    Attributes:
        name: what it is.
        loss: its validation loss, in nats.
    """

    name: str
    loss: float


class Task(abc.ABC):
    """What a run learns.

    Attributes:
        options: of the run.
        stem: the model's attribute that comes before its blocks.
        model: the model as stages, once it is placed.
        loss: what is minimized.
        item: what the loss is per, in the singular.
        items_per_example: how many of these are in an example.
        inputs: shape and dtype of the inputs of one microbatch.
        targets: the same of its targets.
        batches: what to learn from.
        validation: inputs and targets to judge the run on, `[M, microbatch, ...]` arrays.
    """

    options: TrainOptions
    stem: str
    model: FlaxPipeline
    loss: Loss
    item: str
    items_per_example: int
    inputs: jax.ShapeDtypeStruct
    targets: jax.ShapeDtypeStruct
    batches: ShuffledBatches
    validation: tuple[Any, Any]

    def place(self, mesh: Mesh, num_chunks: int) -> None:
        """Cut the model for a mesh, with so many chunks on each stage."""
        self.model = pipeline_from_nnx(
            self.make_model,
            stem=self.stem,
            body="blocks",
            head="head",
            recompute=self.options.recompute,
            num_stages=mesh.shape[STAGE],
            num_chunks=num_chunks,
            inputs=self.inputs,
        )

    def init(self) -> Any:
        """Fresh variables, the same on every mesh; to be traced."""
        return self.model.init(nnx.Rngs(self.options.seed))

    def next_step(self, rows: range) -> tuple[Any, Any]:
        """Inputs and targets of the next step: `[M, ...]` arrays, these rows of each microbatch."""
        inputs, targets = self.batches.next_step(self.options.microbatches, rows)
        return inputs, targets

    @abc.abstractmethod
    def make_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model itself."""

    @abc.abstractmethod
    def facts(self) -> dict[str, str]:
        """What to say of `model` and `data`."""

    @abc.abstractmethod
    def yardstick(self) -> Yardstick:
        """What to compare the validation loss with."""

    def show(self, mesh: Mesh, params: Params) -> tuple[str, str, str] | None:
        """A title and two texts to show at the end, one given and one made by the model, if any."""
        return None
