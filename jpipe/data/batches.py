"""Training batches of a text: shuffled windows."""

import zlib

from jpipe.data.shuffled import ShuffledBatches
from jpipe.data.stream import TokenStream
from jpipe.data.windows import Batch, Windows, as_batch

_FINGERPRINT_WINDOWS = 1024


class TokenBatches(ShuffledBatches):
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
        self,
        train: TokenStream,
        *,
        context: int,
        microbatch_size: int,
        seed: int = 0,
    ) -> None:
        windows = Windows(train, context, "training")
        self._num_windows = len(windows)
        super().__init__(
            windows,
            microbatch_size=microbatch_size,
            seed=seed,
            identity={"context": context, "seed": seed, "data_crc32": _fingerprint(windows)},
        )

    @property
    def num_windows(self) -> int:
        """Examples in an epoch."""
        return self._num_windows

    def next_step(self, num_microbatches: int, rows: range | None = None) -> Batch:
        """Draw the microbatches of one step.

        Args:
            num_microbatches: M.
            rows: which of the B examples to read; None for all.

        Returns:
            Inputs and targets, int32 `[M, B, S]`, or as many of the B as are read here.

        Raises:
            ValueError: if `num_microbatches` is below 1.
        """
        return as_batch(super().next_step(num_microbatches, rows))


def _fingerprint(windows: Windows) -> int:
    """CRC32 of windows spread over the text: enough to notice that it is another."""
    crc = zlib.crc32(str(len(windows)).encode())
    for i in range(0, len(windows), -(-len(windows) // _FINGERPRINT_WINDOWS)):
        crc = zlib.crc32(windows[i].astype("<i4").tobytes(), crc)
    return crc
