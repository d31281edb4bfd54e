"""The fixed examples a run is judged on."""

import dataclasses

import numpy as np

from jpipe.data.stream import TokenStream
from jpipe.data.windows import Batch, Windows, as_batch


@dataclasses.dataclass(frozen=True, eq=False)
class Validation:
    """Validation examples in whole microbatches, the same every time.

    Attributes:
        windows: inputs and targets, int32 `[num_microbatches, microbatch_size, context]`.
        num_dropped: windows of the text that are not among them.
    """

    windows: Batch
    num_dropped: int


def validation_windows(
    text: TokenStream, *, context: int, microbatch_size: int, max_windows: int | None = 1024
) -> Validation:
    """Choose the windows to judge a run on: all, or as many as allowed, spread over the text.

    At the end up to `microbatch_size - 1` of those chosen are left out, to fill the microbatches.

    Args:
        text: the validation text.
        context: tokens an example predicts.
        microbatch_size: examples in a microbatch.
        max_windows: choose no more than these; None for all.

    Raises:
        ValueError: if an argument is out of range, or there are fewer windows than one microbatch.
    """
    for name, value in (("microbatch_size", microbatch_size), ("max_windows", max_windows)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    source = Windows(text, context, "validation")
    chosen = len(source) if max_windows is None else min(len(source), max_windows)
    num_microbatches = chosen // microbatch_size
    if num_microbatches == 0:
        raise ValueError(
            f"microbatch_size={microbatch_size} is more than the {chosen} validation windows "
            f"(context={context}, max_windows={max_windows}): make it or the context smaller, or "
            "give more data"
        )
    kept = num_microbatches * microbatch_size
    windows = np.stack([source[i * len(source) // chosen] for i in range(kept)])
    return Validation(
        windows=as_batch(windows.reshape(num_microbatches, microbatch_size, context + 1)),
        num_dropped=len(source) - kept,
    )
