"""Regular expressions of an adapter's configuration, which may come from anyone.

Python's engine backtracks, so an expression could take hours. Those that are accepted here take time of at most the
cube of a name's length: three repetitions, none of a group.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_PATTERN_LENGTH = 512
MAX_NAME_LENGTH = 256
_MAX_REPETITIONS = 3


Matches = Callable[[str], bool]
"""A test of a name."""


class PatternError(ValueError):
    """An expression is not accepted; the text says why, without a subject."""


class CostlyPatternError(PatternError):
    """An expression might take long."""


def compile_pattern(pattern: str) -> Matches:
    """A test whether a whole name matches.

    Raises:
        PatternError: It is no expression.
        CostlyPatternError: It might take long, or has a part that is not known here.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise CostlyPatternError(f"is longer than {MAX_PATTERN_LENGTH} characters")
    _check_cost(pattern)
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError("is no regular expression") from error
    return lambda name: len(name) <= MAX_NAME_LENGTH and expression.fullmatch(name) is not None


def _check_cost(pattern: str) -> None:
    num_repetitions, index, previous = 0, 0, ""
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            previous, index = pattern[index : index + 2], index + 2
            if previous[1:].isdigit():
                raise CostlyPatternError("refers to a group of its own")
            continue
        if char == "[":
            index = _end_of_class(pattern, index)
            char = "]"
        elif char == "(" and pattern[index + 1 : index + 2] == "?":
            if pattern[index : index + 3] != "(?:":
                raise CostlyPatternError("has a group of a kind that is not supported")
            index += 2
        elif char in "*+{":
            if previous == ")":
                raise CostlyPatternError("repeats a group, which may take long")
            num_repetitions += 1
        previous, index = char, index + 1
    if num_repetitions > _MAX_REPETITIONS:
        raise CostlyPatternError(f"has more than {_MAX_REPETITIONS} repetitions, which may take long")


def _end_of_class(pattern: str, start: int) -> int:
    """The place of the bracket that closes the class which begins at `start`."""
    index = start + 1
    while index < len(pattern) and (pattern[index] != "]" or index == start + 1):
        index += 2 if pattern[index] == "\\" else 1
    return index
