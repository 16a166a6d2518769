"""Results of a search, as sentences and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmstack_insight.tune.command_line import with_settings
from llmstack_insight.tune.figures import LATENCIES, Figures
from llmstack_insight.tune.search import Found
from llmstack_insight.tune.target import Condition, Target


@dataclass(frozen=True, slots=True)
class TuneReport:
    """All that `llmstack tune` prints.

    Attributes:
        recorded: The figures of the requests in the log.
        serve: The command line of the server, without the found settings.
        measured: The figures of the real server in the check, as JSON; None without a check.
        expected: The figures of the requests of the check alone.
    """

    target: Target
    recorded: Figures
    found: Found
    serve: Sequence[str]
    num_requests: int
    num_left_out: int
    measured: Mapping[str, Any] | None = None
    expected: Figures | None = None

    @property
    def is_met(self) -> bool:
        """Whether the best settings meet the target, by expectation."""
        return self.target.is_met(self.found.best.figures)

    @property
    def command(self) -> list[str]:
        """The command line of the server."""
        return with_settings(list(self.serve), self.found.best.settings)

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        conditions = [
            {
                "text": one.text,
                "recorded": self.recorded.value(one.figure),
                "unchanged": self.found.unchanged.figures.value(one.figure),
                "expected": self.found.best.figures.value(one.figure),
                "is_met": one.is_met(self.found.best.figures),
            }
            for one in self.target.conditions
        ]
        return {
            "is_met": self.is_met,
            "command": self.command,
            "settings": dict(self.found.best.settings),
            "target": conditions,
            "recorded": self.recorded.to_json(),
            "unchanged": self.found.unchanged.figures.to_json(),
            "expected": self.found.best.figures.to_json(),
            "requests": self.num_requests,
            "left_out": self.num_left_out,
            "tried": self.found.num_tried,
            "is_complete": self.found.is_complete,
            "check": self._check_to_json(),
        }

    def _check_to_json(self) -> dict[str, Any] | None:
        if self.measured is None or self.expected is None:
            return None
        return {"measured": dict(self.measured), "expected": self.expected.to_json()}

    def to_text(self) -> str:
        """Sentences, the command line first."""
        lines = [shlex.join(self.command)]
        if not self.found.best.settings:
            lines[0] += "   # the settings of the log"
        lines += [self._condition(one) for one in self.target.conditions]
        lines += [self._search(), *self._table()]
        if self.measured is not None:
            lines += self._check(self.measured)
        return "\n".join(lines)

    def _condition(self, one: Condition) -> str:
        def shown(figures: Figures) -> str:
            return show(one.figure, figures.value(one.figure))

        best = self.found.best.figures
        verdict = "is expected to be met" if one.is_met(best) else "is NOT expected to be met by any settings tried"
        error = _error(self.recorded.value(one.figure), self.found.unchanged.figures.value(one.figure))
        return (
            f"{one.text} {verdict}: {shown(best)}. It was {shown(self.recorded)} in the log, which the same "
            f"simulation of the unchanged settings gives as {shown(self.found.unchanged.figures)}{error}."
        )

    def _search(self) -> str:
        left_out = f", without {self.num_left_out} that cannot be simulated" if self.num_left_out else ""
        end = "" if self.found.is_complete else "; the search ended at its bound"
        return f"{self.found.num_tried} settings were tried on {self.num_requests} requests{left_out}{end}."

    def _table(self) -> list[str]:
        columns = (self.recorded, self.found.unchanged.figures, self.found.best.figures)
        names = [f"{latency}_{statistic}" for latency in LATENCIES for statistic in ("p50", "p99")]
        names += ["preemptions", "output_tokens_per_s"]
        rows: list[Sequence[str]] = [("", "log", "unchanged", "expected")]
        rows += [(name, *(show(name, one.value(name)) for one in columns)) for name in names]
        return _aligned(rows)

    def _check(self, measured: Mapping[str, Any]) -> list[str]:
        failed = measured.get("failed")
        sentence = f"The real server was measured with {measured.get('requests')} requests of the log"
        lines = [sentence + (f", of which {failed:g} failed." if failed else ".")]
        rows: list[Sequence[str]] = [("", "expected", "measured")]
        for latency in ("ttft", "tpot", "e2e"):
            for statistic in ("p50", "p99"):
                name = f"{latency}_{statistic}"
                expected = None if self.expected is None else self.expected.value(name)
                rows.append((name, show(name, expected), show(name, measured.get(f"{latency}_s", {}).get(statistic))))
        return lines + _aligned(rows)


def show(name: str, value: float | None) -> str:
    """A figure with its unit."""
    if value is None:
        return "-"
    if name.partition("_")[0] not in LATENCIES:
        return f"{value:.4g}"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _error(real: float | None, simulated: float | None) -> str:
    if not real or simulated is None:
        return ""
    return f" (an error of {100 * (simulated - real) / real:+.0f} %)"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
