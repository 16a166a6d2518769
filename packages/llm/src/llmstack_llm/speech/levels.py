"""Loudness along a file: parts with sound, and quiet places for cuts."""

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
PAUSE_LEVELS: Final = 15
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
        stop = find_cut(levels, start, max_levels).place
        stretch = voiced_stretch(levels, start, stop)
        if stretch is not None:
            yield stretch
        start = stop


class Cut(NamedTuple):
    """The end of a passage, in levels.

    Attributes:
        is_known: Whether it ends at `place`, whatever follows. Otherwise it ends there or later.
    """

    place: int
    is_known: bool


def voiced_stretch(levels: Sequence[float], start: int, stop: int) -> Stretch | None:
    """The part of a passage that is not silent, with a margin; None where all of it is."""
    first = next((index for index in range(start, stop) if levels[index] > SILENCE), None)
    if first is None:
        return None
    last = next(index for index in range(stop - 1, first - 1, -1) if levels[index] > SILENCE)
    return Stretch(max(start, first - _MARGIN), min(stop, last + 1 + _MARGIN))


def find_cut(
    levels: Sequence[float], start: int, max_levels: int, *, is_whole: bool = True, least: int = 0
) -> Cut:  # fmt: skip
    """The middle of the quietest run in the last third of a passage, else before, else in the first one behind it.

    Args:
        levels: Among them are those of the passage.
        start: Where it begins.
        max_levels: Of a passage that has a pause.
        is_whole: Whether these are all levels. Where more follow, a cut is known once nothing that follows can move it.
        least: Of an earlier call with fewer levels of the same passage: the place where it can end at least.
    """
    if len(levels) - start <= max_levels:
        return Cut(len(levels) if is_whole else start, is_whole)
    third = max_levels // 3
    loud = loud_level(levels[start : start + max_levels])
    places = [start + 2 * third, start + third, *range(start + max_levels - PAUSE_LEVELS, len(levels), third)]
    for first in places:
        if first < least:
            continue  # looked at before
        if first + third > len(levels) and not is_whole:
            return Cut(first, is_known=False)
        quietest, level = _quietest(levels, first, min(first + third, len(levels)))
        if level <= max(SILENCE, _PAUSE * loud):
            return Cut(quietest, is_known=True)
    return Cut(len(levels) if is_whole else places[-1] + third, is_whole)


def has_pause(levels: Sequence[float], start: int, stop: int) -> bool:
    """Whether what is said between two places ends in a pause of 0.3 s."""
    threshold = max(SILENCE, _PAUSE * loud_level(levels[start:stop]))
    return stop - start >= PAUSE_LEVELS and max(levels[stop - PAUSE_LEVELS : stop]) <= threshold


def _quietest(levels: Sequence[float], first: int, last: int) -> tuple[int, float]:
    """The middle of the quietest run between two places, and its mean."""
    if last - first < PAUSE_LEVELS:
        return last, float("inf")
    total = sum(levels[first : first + PAUSE_LEVELS])
    best, best_total = first, total
    for index in range(first + PAUSE_LEVELS, last):
        total += levels[index] - levels[index - PAUSE_LEVELS]
        if total < best_total:
            best, best_total = index - PAUSE_LEVELS + 1, total
    return best + PAUSE_LEVELS // 2, best_total / PAUSE_LEVELS


def loud_level(levels: Sequence[float]) -> float:
    """The level that a passage is below but for its loudest twentieth."""
    return sorted(levels)[int(_LOUD * (len(levels) - 1))] if levels else 0.0


def num_voiced(levels: Sequence[float], loud: float) -> int:
    """The levels of a passage in which something may be said, by the loud level of what is around it."""
    threshold = max(SILENCE, _PAUSE * loud)
    return sum(level > threshold for level in levels)
