"""Several token arrays read as one text, without joining them in memory."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.integer[Any]]
"""Token ids `[num_tokens]` of any integer dtype, in memory or memory-mapped."""


class TokenStream:
    """Token arrays one after the other, read a stretch at a time.

    A stretch may run from one array into the next, as if the files had been concatenated; only
    what is read is copied.

    Args:
        parts: the arrays, each integer `[num_tokens]`.
    """

    def __init__(self, parts: Sequence[TokenArray]) -> None:
        self.parts = tuple(parts)
        self._starts = (0, *itertools.accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._starts[-1]

    def view(self, start: int, stop: int) -> "TokenStream":
        """The tokens `start` to `stop - 1` as a stream of their own; copies nothing."""
        return TokenStream(list(self._pieces(start, stop)))

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """Copy the tokens `start` to `stop - 1`.

        Returns:
            int32 `[stop - start]`, shorter where the stream ends before `stop`.
        """
        empty = np.empty(0, np.int32)
        return np.concatenate([empty, *self._pieces(start, stop)], dtype=np.int32)

    def _pieces(self, start: int, stop: int) -> Iterator[TokenArray]:
        first = bisect.bisect_right(self._starts, start) - 1
        for part, offset in zip(self.parts[first:], self._starts[first:-1], strict=True):
            if offset >= stop:
                return
            yield part[max(start - offset, 0) : stop - offset]


def joined(streams: Sequence[TokenStream]) -> TokenStream:
    """The streams one after the other, as one; copies nothing."""
    return TokenStream([part for stream in streams for part in stream.parts])
