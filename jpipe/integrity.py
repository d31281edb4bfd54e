"""Checksums of arrays: CRC32, as `zlib.crc32` has it."""

import zlib
from typing import Any

import numpy as np


def crc32_of(array: Any) -> int:
    """CRC32 of an array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
