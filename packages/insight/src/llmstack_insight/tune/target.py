"""Targets such as `ttft_p99<500ms, preemptions<=10`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf, isfinite
from typing import Final

from llmstack_insight.tune.figures import LATENCIES, PLAIN_FIGURES, Figures

MAX_CONDITIONS: Final = 8
UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_CONDITION: Final = re.compile(r"\s*([a-z0-9_.]+)\s*(<=|>=|<|>)\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*")
_STATISTIC: Final = re.compile(r"mean|max|p[0-9]{1,2}(\.[0-9]{1,3})?")
_EXAMPLE: Final = "such as ttft_p99<500ms"


class TargetError(ValueError):
    """The text is no target; one line, which says what is."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison; times in seconds."""

    figure: str
    operator: str
    limit: float
    text: str

    def is_met(self, figures: Figures) -> bool:
        """Whether the figure lies within the limit; one that does not exist meets nothing."""
        value = figures.value(self.figure)
        if value is None:
            return False
        is_equal_met = self.operator.endswith("=") and value == self.limit
        return is_equal_met or (value < self.limit if self.operator.startswith("<") else value > self.limit)

    def excess(self, figures: Figures) -> float:
        """The distance of the figure from the limit, as a share of it; 0 where the limit is kept."""
        value = figures.value(self.figure)
        if value is None:
            return inf
        if self.is_met(figures):
            return 0.0
        return abs(value - self.limit) / max(abs(self.limit), 1e-9) + 1e-9


@dataclass(frozen=True, slots=True)
class Target:
    """Conditions that all have to be met."""

    conditions: tuple[Condition, ...]

    def is_met(self, figures: Figures) -> bool:
        """Whether all conditions are met."""
        return all(condition.is_met(figures) for condition in self.conditions)

    def excess(self, figures: Figures) -> float:
        """The sum over the conditions that are not met; 0 where all are."""
        return sum(condition.excess(figures) for condition in self.conditions)


def parse_target(text: str) -> Target:
    """Reads one or several conditions, separated by commas.

    Raises:
        TargetError: A part is no condition; the text says what is.
    """
    parts = [part for part in text.split(",") if part.strip()]
    if not parts or len(parts) > MAX_CONDITIONS:
        raise TargetError(f"needs 1 to {MAX_CONDITIONS} conditions, {_EXAMPLE}")
    return Target(tuple(_condition(part.strip()) for part in parts))


def _condition(text: str) -> Condition:
    matched = _CONDITION.fullmatch(text)
    if matched is None:
        raise TargetError(f"{text[:64]!r} is no condition, {_EXAMPLE}: a figure, one of < <= > >=, and a number")
    figure, operator, number, unit = matched.groups()
    is_time = _check_figure(figure)
    if is_time and unit not in UNITS:
        raise TargetError(f"{text[:64]!r} needs a unit: {', '.join(UNITS)}")
    if not is_time and unit:
        raise TargetError(f"{text[:64]!r}: {figure} has no unit, but {unit!r} was given")
    try:
        limit = float(number) * (UNITS[unit] if is_time else 1.0)
    except ValueError:
        raise TargetError(f"{text[:64]!r}: {number[:32]!r} is no number") from None
    if not isfinite(limit):
        raise TargetError(f"{text[:64]!r}: the number is too large")
    return Condition(figure, operator, limit, text)


def _check_figure(name: str) -> bool:
    """Whether it is a time.

    Raises:
        TargetError: There is no such figure.
    """
    if name in PLAIN_FIGURES:
        return False
    latency, _, statistic = name.partition("_")
    if latency not in LATENCIES:
        known = ", ".join([*(f"{latency}_p99" for latency in LATENCIES), *PLAIN_FIGURES])
        raise TargetError(f"there is no figure {name[:64]!r}; there are {known}")
    if not _STATISTIC.fullmatch(statistic) or statistic == "p0":
        raise TargetError(f"there is no {name[:64]!r}: after {latency}_ comes mean, max, or p1 to p99.999")
    return True
