"""Types of the numbers that several subcommands take."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number, at least 1.

    Raises:
        ArgumentTypeError: It is smaller.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below the minimum of 1")
    return number


def above_zero(text: str) -> float:
    """A finite number above 0.

    Raises:
        ArgumentTypeError: It is none.
    """
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number
