"""jpipe: SPMD pipeline parallelism for JAX."""

__version__ = "0.1.0"
