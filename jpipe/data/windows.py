"""A text cut into windows: what one example is.

S is the context. A window is S + 1 tokens, so that each of its S inputs has a target, the token
after it. Windows start S tokens apart: every token but the first is a target exactly once, and
the one token two neighbours share is target in the first and input in the second.
"""

from typing import NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from jpipe.data.stream import TokenStream


class Batch(NamedTuple):
    """Examples: `targets[..., i]` is to be predicted from `inputs[..., : i + 1]`.

    Attributes:
        inputs: int32 `[..., S]`.
        targets: int32 `[..., S]`.
    """

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]


def as_batch(windows: NDArray[np.int32]) -> Batch:
    """Split windows `[..., S + 1]` into inputs and targets `[..., S]`, as views."""
    return Batch(windows[..., :-1], windows[..., 1:])


class Windows:
    """The windows of a text, by number; what is left over at the end is in none.

    Args:
        text: the tokens.
        context: S, at least 1.
        role: what the text is for ("training"), for the error message.

    Raises:
        ValueError: if `context` is below 1 or the text does not fill one window.
    """

    def __init__(self, text: TokenStream, context: int, role: str) -> None:
        if context < 1:
            raise ValueError(f"context={context} must be at least 1")
        if len(text) <= context:
            raise ValueError(
                f"context={context} needs at least {context + 1} tokens, but the {role} text has "
                f"{len(text)}: shorten the context or give more data"
            )
        self._text = text
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: SupportsIndex) -> NDArray[np.int32]:
        start = int(index) * self._context
        return self._text.read(start, start + self._context + 1)
