"""Where there is sound in a file, and where it can be cut: at its quietest places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

LEVELS_PER_S: Final = 50
SILENCE: Final = 3e-4
"""Root of the mean square of 20 ms below which nothing is said, 70 dB below the loudest."""
_PAUSE: Final = 0.1
"""Share of a passage's loud level below which there is a pause in it."""
_LOUD: Final = 0.95
"""Share of a passage's levels that its loud level is above."""
_RUN: Final = 15
"""Levels of the shortest pause: 0.3 s."""
_MARGIN: Final = 10
"""Levels of silence that are kept around what is said: 0.2 s."""


class Stretch(NamedTuple):
    """A part of a file between pauses, in levels."""

    start: int
    stop: int


def stretches(levels: Sequence[float], max_levels: int) -> Iterator[Stretch]:
    """The parts of a file in which something is said, cut at pauses.

    Each has at most `max_levels`, unless there is no pause in so many: it goes on to the next one then.
    """
    start = 0
    while start < len(levels):
        stop = len(levels) if len(levels) - start <= max_levels else _cut(levels, start, max_levels)
        voiced = [index for index in range(start, stop) if levels[index] > SILENCE]
        if voiced:
            yield Stretch(max(start, voiced[0] - _MARGIN), min(stop, voiced[-1] + 1 + _MARGIN))
        start = stop


def _cut(levels: Sequence[float], start: int, max_levels: int) -> int:
    """The middle of the quietest run in the last third of a passage, else before, else in the first one behind it."""
    third = max_levels // 3
    loud = loud_level(levels[start : start + max_levels])
    places = [start + 2 * third, start + third, *range(start + max_levels - _RUN, len(levels), third)]
    for first in places:
        quietest, level = _quietest(levels, first, min(first + third, len(levels)))
        if level <= max(SILENCE, _PAUSE * loud):
            return quietest
    return len(levels)


def _quietest(levels: Sequence[float], first: int, last: int) -> tuple[int, float]:
    """The middle of the quietest run between two places, and its mean."""
    if last - first < _RUN:
        return last, float("inf")
    total = sum(levels[first : first + _RUN])
    best, best_total = first, total
    for index in range(first + _RUN, last):
        total += levels[index] - levels[index - _RUN]
        if total < best_total:
            best, best_total = index - _RUN + 1, total
    return best + _RUN // 2, best_total / _RUN


def loud_level(levels: Sequence[float]) -> float:
    """The level that a passage is below but for its loudest twentieth."""
    return sorted(levels)[int(_LOUD * (len(levels) - 1))] if levels else 0.0


def num_voiced(levels: Sequence[float], loud: float) -> int:
    """The levels of a passage in which something may be said, by the loud level of what is around it."""
    threshold = max(SILENCE, _PAUSE * loud)
    return sum(level > threshold for level in levels)
