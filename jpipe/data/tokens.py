"""From files to a training and a validation text."""

import dataclasses
import itertools
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from jpipe.data.files import TOKEN_SUFFIXES, open_text, open_tokens
from jpipe.data.python_text import python_topics
from jpipe.data.stream import TokenArray, TokenStream, joined

NUM_BYTES = 256  # the vocabulary of raw bytes
_MAX_VOCAB = 2**31  # ids are handed on as int32
_VALIDATION_SHARE = 10  # one token in ten is held out
_MAX_BLOCKS = 16
_MIN_BLOCK = 2048  # tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """A text as token ids, in two parts that share no token.

    Attributes:
        train: what to learn from.
        validation: what to be judged on.
        vocab_size: ids lie in `[0, vocab_size)`.
        description: what the text is and how much of it, in one line.
        is_bytes: whether an id is a byte of UTF-8 (or whatever the file held).
    """

    train: TokenStream
    validation: TokenStream
    vocab_size: int
    description: str
    is_bytes: bool


def load_tokens(paths: Sequence[str | Path] = (), vocab_size: int | None = None) -> Tokens:
    """Open files as one text and hold out a tenth of it.

    Several files are read one after the other, in the order given, as one text: a window may
    begin in one and end in the next. They are mapped, not loaded: leave them as they are while a
    run reads them.

    The validation text is up to 16 blocks spread evenly over the whole, so that it is a fair
    sample of a text whose end is unlike its start, and yet long stretches of it. What is left is
    the training text. Each is joined, so a window may also span two blocks.

    Args:
        paths: text files, read as bytes whatever their encoding; or token files, `.npy` (integers
            in one dimension) and `.bin` (bare little-endian uint16, or uint32 if `vocab_size` is
            above 65536). Without any, the help topics of Python.
        vocab_size: for token files, the size of their vocabulary. For text 256 unless given; more
            only leaves ids unused.

    Returns:
        The two texts.

    Raises:
        ValueError: if a file is missing, unreadable, empty, malformed or named twice, if text and
            token files are mixed, or if `vocab_size` is missing or does not fit.
    """
    files = [Path(path) for path in paths]
    _check_distinct(files)
    num_token_files = sum(file.suffix.lower() in TOKEN_SUFFIXES for file in files)
    is_bytes = num_token_files == 0
    if not is_bytes and num_token_files < len(files):
        raise ValueError(
            f"data={' '.join(map(str, files))} mixes text with token files (.bin, .npy): give one "
            "kind"
        )
    vocab_size = _check_vocab_size(vocab_size, is_bytes)
    parts: list[TokenArray] = [python_topics()] if not files else []
    parts += [open_text(f) if is_bytes else open_tokens(f, vocab_size) for f in files]
    train, validation = _split(TokenStream(parts))
    unit = "bytes" if is_bytes else "tokens"
    sizes = f"{len(train):,} {unit} to train, {len(validation):,} to validate"
    return Tokens(
        train=train,
        validation=validation,
        vocab_size=vocab_size,
        description=f"{_name(files)}: {sizes}",
        is_bytes=is_bytes,
    )


def _name(files: list[Path]) -> str:
    if not files:
        return f"help topics of Python {platform.python_version()}"
    return str(files[0]) + (f" and {len(files) - 1} more" if files[1:] else "")


def _check_distinct(files: list[Path]) -> None:
    """Refuse a file named twice: what is held out of one copy would be trained on in the other."""
    resolved = [os.path.realpath(file) for file in files]
    for i, file in enumerate(files):
        if resolved[i] in resolved[:i]:
            raise ValueError(f"data={file} is named twice: name each file once")


def _check_vocab_size(vocab_size: int | None, is_bytes: bool) -> int:
    if vocab_size is None:
        if is_bytes:
            return NUM_BYTES
        raise ValueError(
            "vocab_size=None, but data names token files (.bin, .npy): pass the size of the "
            "vocabulary they were written with"
        )
    if is_bytes and vocab_size < NUM_BYTES:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for text, which is read as bytes: leave it out "
            f"or make it at least {NUM_BYTES}"
        )
    if not 1 <= vocab_size <= _MAX_VOCAB:
        raise ValueError(f"vocab_size={vocab_size} must lie between 1 and {_MAX_VOCAB}")
    return vocab_size


def _split(text: TokenStream) -> tuple[TokenStream, TokenStream]:
    """Cut the text into equal stretches and hold out the last tenth of each."""
    total = len(text)
    num_blocks = min(max(total // (_VALIDATION_SHARE * _MIN_BLOCK), 1), _MAX_BLOCKS)
    edges = [total * i // num_blocks for i in range(num_blocks + 1)]
    train, validation = [], []
    for start, stop in itertools.pairwise(edges):
        middle = stop - (stop - start) // _VALIDATION_SHARE
        train.append(text.view(start, middle))
        validation.append(text.view(middle, stop))
    return joined(train), joined(validation)
