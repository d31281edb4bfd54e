"""Training batches that can be resumed: shuffled windows behind a cursor.

The order of the examples follows from the text, the context and the seed alone. How many make a
microbatch, and how many microbatches a step, only cuts that one sequence into pieces, so runs
that differ in their batching or their mesh see the same examples in the same order.
"""

import zlib
from collections.abc import Mapping

import grain
import numpy as np

from jpipe.data.stream import TokenStream
from jpipe.data.windows import Batch, Windows, as_batch

_FINGERPRINT_WINDOWS = 1024


class TokenBatches:
    """Endless training batches over a text, reshuffled every epoch.

    Legend: M microbatches a step, B examples a microbatch, S the context.

    Args:
        train: the text to learn from.
        context: S.
        microbatch_size: B. A microbatch may hold the end of one epoch and the start of the next.
        seed: decides the order.

    Raises:
        ValueError: if an argument is out of range or the text does not fill one window.
    """

    def __init__(
        self, train: TokenStream, *, context: int, microbatch_size: int, seed: int = 0
    ) -> None:
        if microbatch_size < 1:
            raise ValueError(f"microbatch_size={microbatch_size} must be at least 1")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative")
        windows = Windows(train, context, "training")
        self._num_windows = len(windows)
        self._microbatch_size = microbatch_size
        self._identity = {"context": context, "seed": seed, "data_crc32": _fingerprint(windows)}
        # Grain shuffles epoch e with seed + e: hashed, so that seeds 0 and 1 do not share epochs.
        shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        examples = grain.MapDataset.source(windows).shuffle(seed=shuffle_seed).repeat()
        # One process reads everything. Process p of n would read `examples[p::n]`, in microbatches
        # of B / n: together they read the same examples.
        microbatches = examples.batch(microbatch_size, drop_remainder=True)  # there is none
        # No threads: the text is in memory or mapped, and none should outlive the run.
        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(microbatches.to_iter_dataset(reading))

    @property
    def num_windows(self) -> int:
        """Examples in an epoch."""
        return self._num_windows

    def next_step(self, num_microbatches: int) -> Batch:
        """Draw the microbatches of one step.

        Args:
            num_microbatches: M.

        Returns:
            Inputs and targets, int32 `[M, B, S]`.

        Raises:
            ValueError: if `num_microbatches` is below 1.
        """
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches={num_microbatches} must be at least 1")
        return as_batch(np.stack([next(self._iterator) for _ in range(num_microbatches)]))

    def get_state(self) -> dict[str, int]:
        """The cursor, in microbatches, and what it counts in; fit for JSON."""
        return {
            "next_index": self._iterator.get_state()["next_index"],
            "microbatch_size": self._microbatch_size,
            **self._identity,
        }

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on from where `get_state` was called, here or in another process.

        The microbatch size may be another one, if the cursor falls between two of its microbatches.

        Args:
            state: what `get_state` returned.

        Raises:
            ValueError: if the state belongs to another text, context or seed, or its cursor to
                the middle of a microbatch.
        """
        missing = self.get_state().keys() - state.keys()
        if missing:
            raise ValueError(f"state lacks {sorted(missing)}: pass what get_state returned")
        for name, value in self._identity.items():
            if state[name] != value:
                raise ValueError(
                    f"{name}={value}, but the state to resume from has {name}={state[name]}: "
                    "resume with the data, context and seed that the run began with"
                )
        num_examples = int(state["next_index"]) * int(state["microbatch_size"])
        next_index, rest = divmod(num_examples, self._microbatch_size)
        if rest:
            raise ValueError(
                f"microbatch_size={self._microbatch_size} does not divide the {num_examples} "
                f"examples drawn so far: resume with microbatch_size={state['microbatch_size']}"
            )
        self._iterator.set_state({"next_index": next_index})


def _fingerprint(windows: Windows) -> int:
    """CRC32 of windows spread over the text: enough to notice that it is another."""
    crc = zlib.crc32(str(len(windows)).encode())
    for i in range(0, len(windows), -(-len(windows) // _FINGERPRINT_WINDOWS)):
        crc = zlib.crc32(windows[i].astype("<i4").tobytes(), crc)
    return crc
