"""Flax models as pipeline stages."""

from jpipe.adapters.flax_linen import pipeline_from_linen
from jpipe.adapters.flax_nnx import pipeline_from_nnx
from jpipe.adapters.flax_pipeline import FlaxPipeline

__all__ = ["FlaxPipeline", "pipeline_from_linen", "pipeline_from_nnx"]
