"""Compiled programs outlive the process, so that a second start need not compile."""

import os
from pathlib import Path

import jax


def enable_compilation_cache() -> Path:
    """Keep compiled programs in the user's cache folder; return which one.

    A folder that the user gave JAX (`JAX_COMPILATION_CACHE_DIR`) is respected.
    """
    folder: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = str(Path(home) / "jpipe" / "compiled")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    return Path(folder)
