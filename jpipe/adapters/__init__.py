"""Flax models as pipeline stages."""

from jpipe.adapters.flax_nnx import NnxPipeline, pipeline_from_nnx

__all__ = ["NnxPipeline", "pipeline_from_nnx"]
