"""jpipe: SPMD pipeline parallelism for JAX."""
