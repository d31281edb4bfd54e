"""Examples in an order of their own, behind a cursor: training can be resumed.

The order of the examples follows from the data and the seed alone. How many make a microbatch, and
how many microbatches a step, only cuts that one sequence into pieces, so runs that differ in their
batching, their mesh or their number of processes see the same examples in the same order.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import grain
import numpy as np
from numpy.typing import NDArray


class Examples(Protocol):
    """Examples by number; each an array, or a tuple of arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class ShuffledBatches:
    """Endless batches, reshuffled every epoch.

    Args:
        source: the examples.
        microbatch_size: B. A microbatch may hold the end of one epoch and the start of the next.
        seed: decides the order.
        identity: what the cursor counts in, beside the microbatch size; fit for JSON.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        source: Examples,
        *,
        microbatch_size: int,
        seed: int,
        identity: Mapping[str, int],
    ) -> None:
        if microbatch_size < 1:
            raise ValueError(f"microbatch_size={microbatch_size} must be at least 1")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative")
        # Grain shuffles epoch e with seed + e: hashed, so that seeds 0 and 1 do not share epochs.
        shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._examples = grain.MapDataset.source(source).shuffle(seed=shuffle_seed).repeat()
        self._microbatch_size = microbatch_size
        self._identity = dict(identity)
        self._next_index = 0

    def next_step(self, num_microbatches: int, rows: range | None = None) -> Any:
        """Draw the microbatches of one step.

        Args:
            num_microbatches: M.
            rows: which of the B examples of each microbatch to read; None for all. Processes that
                read different rows read one batch together.

        Returns:
            Examples stacked to `[M, rows read, ...]`.

        Raises:
            ValueError: if `num_microbatches` is below 1.
        """
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches={num_microbatches} must be at least 1")
        rows = range(self._microbatch_size) if rows is None else rows
        first, self._next_index = self._next_index, self._next_index + num_microbatches
        drawn = [
            [self._examples[i * self._microbatch_size + row] for row in rows]
            for i in range(first, self._next_index)
        ]
        if isinstance(drawn[0][0], tuple):
            fields = range(len(drawn[0][0]))
            return tuple(_stack([[e[f] for e in examples] for examples in drawn]) for f in fields)
        return _stack(drawn)

    def get_state(self) -> dict[str, int]:
        """The cursor, in microbatches, and what it counts in; fit for JSON."""
        return {
            "next_index": self._next_index,
            "microbatch_size": self._microbatch_size,
            **self._identity,
        }

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on from where `get_state` was called, here or in another process.

        The microbatch size may be another one, if the cursor falls between two of its microbatches.

        Args:
            state: what `get_state` returned.

        Raises:
            ValueError: if the state belongs to other data or another seed, or its cursor to the
                middle of a microbatch.
        """
        missing = self.get_state().keys() - state.keys()
        if missing:
            raise ValueError(f"state lacks {sorted(missing)}: pass what get_state returned")
        for name, value in self._identity.items():
            if state[name] != value:
                raise ValueError(
                    f"{name}={value}, but the state to resume from has {name}={state[name]}: "
                    "resume with the data and settings that the run began with"
                )
        num_examples = int(state["next_index"]) * int(state["microbatch_size"])
        next_index, rest = divmod(num_examples, self._microbatch_size)
        if rest:
            raise ValueError(
                f"microbatch_size={self._microbatch_size} does not divide the {num_examples} "
                f"examples drawn so far: resume with microbatch_size={state['microbatch_size']}"
            )
        self._next_index = next_index


def _stack(arrays: list[list[Any]]) -> NDArray[Any]:
    return np.stack([np.stack(row) for row in arrays])
