"""Opening text and token files: memory-mapped, and refused with a reason when unusable."""

from pathlib import Path
from typing import Any

import numpy as np

from jpipe.data.stream import TokenArray

TOKEN_SUFFIXES = (".bin", ".npy")
_CHECK_CHUNK = 2**22  # tokens read at once to check them: 8 to 32 MiB


def open_text(path: Path) -> TokenArray:
    """Map any file as bytes.

    Returns:
        uint8 `[num_bytes]`, memory-mapped.

    Raises:
        ValueError: if the file is missing, unreadable, not a file, or empty.
    """
    _file_size(path)
    return _map(path, np.dtype(np.uint8))


def open_tokens(path: Path, vocab_size: int) -> TokenArray:
    """Map a token file and check that every id is in the vocabulary.

    Args:
        path: a `.npy` file with a one-dimensional integer array, or a `.bin` file with nothing
            but little-endian ids: uint16, or uint32 if `vocab_size` is above 65536.
        vocab_size: ids must lie in `[0, vocab_size)`.

    Returns:
        The file's integers `[num_tokens]`, memory-mapped.

    Raises:
        ValueError: if the file is missing, unreadable, empty, truncated, of another shape or
            dtype, or holds an id outside the vocabulary.
    """
    tokens = _open_npy(path) if path.suffix.lower() == ".npy" else _open_bin(path, vocab_size)
    _check_ids(path, tokens, vocab_size)
    return tokens


def _file_size(path: Path) -> int:
    """Bytes in a regular, non-empty file."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if not path.is_file():
        raise ValueError(f"data={path} is not a file: name the files in it one by one")
    if size == 0:
        raise ValueError(f"data={path} is empty: name a file with something in it")
    return size


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"data={path} cannot be read ({error.strerror or error}): "
        "check the path and its permissions"
    )


def _map(path: Path, dtype: np.dtype[np.unsignedinteger[Any]]) -> TokenArray:
    try:
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise _unreadable(path, error) from error


def _open_bin(path: Path, vocab_size: int) -> TokenArray:
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    size = _file_size(path)
    if size % dtype.itemsize:
        raise ValueError(
            f"data={path} has {size} bytes, not a whole number of {dtype.itemsize}-byte ids "
            f"(vocab_size={vocab_size}): is it truncated, or does it hold something else?"
        )
    return _map(path, dtype)


def _open_npy(path: Path) -> TokenArray:
    _file_size(path)
    try:
        # `open_memmap` rather than `np.load`, which would try to unpickle a file that is no npy.
        tokens = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise ValueError(
            f"data={path} is not a whole .npy file of integers ({error}): write it again with "
            "np.save"
        ) from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"data={path} holds {tokens.dtype} {list(tokens.shape)}: token ids must be integers "
            "in one dimension, save `ids.astype(np.uint32).ravel()` instead"
        )
    if len(tokens) == 0:
        raise ValueError(f"data={path} is empty: name a file with something in it")
    return tokens


def _check_ids(path: Path, tokens: TokenArray, vocab_size: int) -> None:
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    for start in range(0, len(tokens), _CHECK_CHUNK):
        chunk = tokens[start : start + _CHECK_CHUNK]
        if chunk.min() >= 0 and chunk.max() < vocab_size:
            continue
        at = int(np.argmax((chunk < 0) | (chunk >= vocab_size)))
        raise ValueError(
            f"data={path}: token {start + at} is {chunk[at]}, outside vocab_size={vocab_size}: "
            "pass the vocabulary size of the tokenizer that wrote the file, and see that the "
            "file holds bare ids without a header"
        )
