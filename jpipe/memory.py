"""How many bytes a compiled program needs on each device."""

from typing import Any, NamedTuple

import jax


class Memory(NamedTuple):
    """Bytes per device.

    Attributes:
        state: what lives from step to step: parameters and optimizer state.
        temporary: what the program needs beside it while it runs: gradients, stash, activations.
    """

    state: int
    temporary: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.state + self.temporary


def memory_of(compiled: jax.stages.Compiled) -> Memory:
    """The compiler's own figures for one device.

    Args:
        compiled: a program whose state is donated, so that results take the place of arguments.
    """
    found: Any = compiled.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return Memory(found.argument_size_in_bytes, found.temp_size_in_bytes + results)


def format_bytes(count: float) -> str:
    """A number of bytes in a unit that people read, such as `1.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
