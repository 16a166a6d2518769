"""Types of the values of flags: each reads a text or says in one sentence what is wrong with it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

QUANTIZATIONS = ("int8", "int4", "fp8")

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def count(text: str) -> int:
    """An integer with an optional suffix, as vLLM reads it: `4k` is 4000, `4K` is 4096; `-1` is allowed."""
    scale = _SUFFIXES.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    try:
        number = float(digits) * scale if "." in digits and scale > 1 else int(digits) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number such as 4096, 4k or 4K") from None
    return int(number)


def at_least(minimum: int, parse: Callable[[str], int] = int) -> Callable[[str], int]:
    """A type of argument: an integer not below `minimum`."""

    def parse_bounded(text: str) -> int:
        try:
            number = parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is below the minimum of {minimum}")
        return number

    return parse_bounded


def row_counts(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    return [at_least(1)(part) for part in text.split(",")]


class JoinedLists(argparse.Action):
    """For values that are lists themselves: `1,2 4` is 1, 2 and 4."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Keeps one list."""
        setattr(namespace, self.dest, [value for part in values or () for value in part])


def port(text: str) -> int:
    """A port number; 0 lets the system choose."""
    number = at_least(0)(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{number} is above the maximum of 65535")
    return number


def share(text: str) -> float:
    """A number in (0, 1]."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not 0.0 < number <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"'{text[:64]}' is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"'{text[:64]}' is no JSON object")
    return parsed


def seconds(text: str) -> float:
    """A number of seconds, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds") from None
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 up")
    return number


def gibibytes(text: str) -> float:
    """A size in GiB, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of GiB") from None
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of GiB from 0 up")
    return number


def quantization(text: str) -> str:
    """A scheme that weights are quantized by on loading."""
    if text not in QUANTIZATIONS:
        known = f"{', '.join(QUANTIZATIONS[:-1])} and {QUANTIZATIONS[-1]}"
        raise argparse.ArgumentTypeError(
            f"'{text[:64]}' is not supported: {known} are, from a checkpoint in full precision"
        )
    return text


def chat_template(text: str) -> str:
    """A file that is there, or a template itself, which has braces."""
    if "{" not in text and "\n" not in text and not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text[:200]!r}, and a template would have braces")
    return text


def module_and_class(text: str) -> str:
    """`module:Class`; whether there is one is known once it is loaded."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not of the form module:Class")
    return text
