"""What jpipe's commands share: bad input is one message on stderr and exit status 2."""

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")

BAD_INPUT = 2
"""Exit status for bad input."""
FAILED = 1
"""Exit status after a loss that is not finite, or a file that cannot be written."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
CRASHED = 70
"""Exit status after an error that was not foreseen."""
WEDGED = 86
"""Exit status of a process that made no progress and was ended by its watchdog."""
TERMINATED = 143
"""Exit status after SIGTERM, as shells have it."""


class Parser(argparse.ArgumentParser):
    """Raises its errors, so that a command says all bad input in one way."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise ValueError(f"{message}; --help shows the arguments")


def refuse(error: ValueError) -> int:
    """Print why the input is refused; return the exit status."""
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT


def whole_number(least: int) -> Callable[[str], int]:
    """An argument type: a whole number from `least` to what 32 bits hold."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a whole number of at least {least}, and below 2^31"
            )
        return int(text)

    return parse


def number(*, above: bool) -> Callable[[str], float]:
    """An argument type: a finite number above 0, or from 0 on."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (above and value == 0):
            bound = "above 0" if above else "of at least 0"
            raise argparse.ArgumentTypeError(f"{text!r} must be a finite number {bound}")
        return value

    return parse


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """An argument type of a function whose ValueError says what is wrong."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument
