"""Run a model as a pipeline of stages: loss and gradients, evaluation, prediction."""

from jpipe.pipeline.blocks import Recompute, repeat_block
from jpipe.pipeline.evaluate import pipeline_evaluate, pipeline_predict
from jpipe.pipeline.gradients import pipeline_value_and_grad
from jpipe.pipeline.layout import batch_sharding, fsdp, param_shardings, param_specs
from jpipe.pipeline.losses import Loss, LossTerms
from jpipe.pipeline.per_stage import Chunks, PerStage
from jpipe.pipeline.segments import Segments, pipeline_segments
from jpipe.pipeline.stages import Params, Stages
from jpipe.pipeline.verify import INTACT, describe_mismatches

__all__ = [
    "INTACT",
    "Chunks",
    "Loss",
    "LossTerms",
    "Params",
    "PerStage",
    "Recompute",
    "Segments",
    "Stages",
    "batch_sharding",
    "describe_mismatches",
    "fsdp",
    "param_shardings",
    "param_specs",
    "pipeline_evaluate",
    "pipeline_predict",
    "pipeline_segments",
    "pipeline_value_and_grad",
    "repeat_block",
]
