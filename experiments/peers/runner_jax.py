"""How the JAX workers run what they compare."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from problem import STAGES
from resident import resident_growth

Tree = Any


class Compiled:
    """One compiled program `(arguments) -> (loss, gradients)`."""

    def __init__(self, program: jax.stages.Compiled, arguments: tuple[Any, ...]) -> None:
        self._program, self._arguments = program, arguments

    def check(self) -> dict[str, float]:
        """Loss and norm of the gradient."""
        return loss_and_norm(self._program(*self._arguments))

    def time(self) -> dict[str, float]:
        """Run once."""
        return timed(lambda: self._program(*self._arguments))

    def memory(self) -> dict[str, int]:
        """Temporary bytes of a device, from the compiler, and growth of the whole process."""
        temp = self._program.memory_analysis().temp_size_in_bytes
        resident = resident_growth(lambda: jax.block_until_ready(self._program(*self._arguments)))
        return {"compiled": temp, "resident": resident}

    def close(self) -> None:
        """The garbage collector does it."""


class Eager:
    """Many programs called from Python."""

    def __init__(self, step: Callable[[], tuple[jax.Array, Tree]]) -> None:
        self._step = step

    def check(self) -> dict[str, float]:
        """Loss and norm of the gradient."""
        return loss_and_norm(self._step())

    def time(self) -> dict[str, float]:
        """Run once."""
        return timed(self._step)

    def memory(self) -> dict[str, int]:
        """Growth of live arrays on the fullest device, and of the whole process."""
        resident = resident_growth(lambda: jax.block_until_ready(self._step()))
        return {"live": _live_growth(self._step), "resident": resident}

    def close(self) -> None:
        """The garbage collector does it."""


def loss_and_norm(result: tuple[jax.Array, Tree]) -> dict[str, float]:
    """Loss, and norm of the gradient in float64 so that the order of summation does not matter."""
    loss, grads = jax.device_get(result)
    squares = [np.sum(np.square(g.astype(np.float64))) for g in jax.tree.leaves(grads)]
    return {"loss": float(loss), "grad_norm": float(np.sqrt(sum(squares)))}


def timed(run: Callable[[], Any]) -> dict[str, float]:
    """Process CPU time is the work of all simulated devices together."""
    cpu, wall = time.process_time(), time.perf_counter()
    jax.block_until_ready(run())
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def _live_growth(step: Callable[[], Any]) -> int:
    """Peak of the bytes of all arrays that Python holds, looked at every millisecond."""

    def live() -> np.ndarray:
        held = np.zeros(STAGES, np.int64)
        for array in jax.live_arrays():
            if len(array.devices()) == 1:  # as all that these programs make
                held[array.device.id] += array.nbytes
        return held

    before, peaks, done = live(), [], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            try:
                peaks.append(live())
            except RuntimeError:  # an array was deleted while it was looked at
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    jax.block_until_ready(step())
    done.set()
    watcher.join()
    return int(np.max(np.max(peaks, axis=0) - before))
