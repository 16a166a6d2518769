"""How long sessions pause, by class, and the chance that one returns soon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

NUM_STAGES = 30
MAX_CLASSES = 64
"""Of one tenant; pauses of further ones count in the classes above them."""
HORIZON_S = 300.0
"""A session that returns later than that is worth no more now than one that never does."""

_FIRST_STAGE_S = 0.5
_STAGES_PER_OCTAVE = 2
_RETURNS_UNKNOWN = 0.12
"""The share that returns within a stage, before any was seen: equal in all, so the longest pause is worth least."""
_WEIGHT = 2.0
"""A class counts as so many pauses like those of the class above it."""

ENDS_S = tuple(_FIRST_STAGE_S * 2 ** (stage / _STAGES_PER_OCTAVE) for stage in range(NUM_STAGES - 1))
"""When each stage of a pause ends, in seconds from its beginning; the last one has no end."""

PauseClass = tuple[Any, ...]
"""What is known of a session that pauses, the most general first. Each beginning of it is a class above it."""


class PauseTable:
    """Counts of one tenant's pauses by class and stage: how many came so far, and how many returned within it.

    Pauses that have not ended count as far as they have come, so those that never end count as well (Kaplan, Meier).
    """

    def __init__(self) -> None:
        self._counts: dict[PauseClass, list[list[int]]] = {}
        self._worths: dict[PauseClass, list[float]] = {}

    def count(self, pause_class: PauseClass, stage: int, *, returns: bool) -> None:
        """A pause of the class has passed a stage, or returned within it."""
        for length in range(1, len(self.known(pause_class)) + 1):
            counts = self._counts.get(pause_class[:length])
            if counts is not None:
                counts[0][stage] += 1
                counts[1][stage] += returns
        self._worths.clear()

    def known(self, pause_class: PauseClass) -> PauseClass:
        """The class, or a more general one in which it counts once there are `MAX_CLASSES` others."""
        for length in range(1, len(pause_class) + 1):
            if pause_class[:length] not in self._counts:
                if len(self._counts) >= MAX_CLASSES:
                    return pause_class[: max(length - 1, 1)]
                self._counts[pause_class[:length]] = [[0] * NUM_STAGES, [0] * NUM_STAGES]
        return pause_class

    def worth(self, pause_class: PauseClass, stage: int) -> float:
        """The chance of a return within the horizon, for a pause that has come to the stage."""
        worths = self._worths.get(pause_class)
        if worths is None:
            worths = self._worths[pause_class] = _chances(self._shares(pause_class))
        return worths[stage]

    def state(self) -> list[Any]:
        """All counts, as plain data."""
        return [[list(key), *([*one] for one in counts)] for key, counts in self._counts.items()]

    def restore(self, state: Sequence[Any]) -> None:
        """Puts it into a state."""
        self._counts = {as_tuple(key): [[*passed], [*returned]] for key, passed, returned in state}
        self._worths.clear()

    def _shares(self, pause_class: PauseClass) -> list[float]:
        """For each stage, the share of the pauses in it that return within it."""
        shares = [_RETURNS_UNKNOWN] * NUM_STAGES
        for length in range(1, len(pause_class) + 1):
            counts = self._counts.get(pause_class[:length])
            if counts is not None:
                shares = [
                    (returned + _WEIGHT * share) / (passed + _WEIGHT)
                    for share, passed, returned in zip(shares, *counts, strict=True)
                ]
        return shares


def _chances(shares: list[float]) -> list[float]:
    """From the beginning of each stage, the chance of a return within the horizon."""
    starts = [0.0, *ENDS_S]
    chances = []
    for first in range(NUM_STAGES):
        last_s, left = starts[first] + HORIZON_S, 1.0
        for stage, (start_s, end_s) in enumerate(pairwise([*starts[first:], math.inf]), first):
            if end_s >= last_s:
                whole_s = (end_s if math.isfinite(end_s) else 2 * start_s) - start_s
                left *= (1 - shares[stage]) ** min(1.0, (last_s - start_s) / whole_s)
                break
            left *= 1 - shares[stage]
        chances.append(1 - left)
    return chances


def as_tuple(value: Any) -> Any:
    """Lists as tuples, at any depth: what was a key before it was plain data."""
    return tuple(map(as_tuple, value)) if isinstance(value, list | tuple) else value
