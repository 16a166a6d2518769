"""The figures of one run: latencies, preemptions and tokens per second."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

from llmstack_insight.rerun import Outcome

LATENCIES: Final = ("ttft", "tpot", "e2e", "queue")
PLAIN_FIGURES: Final = ("preemptions", "refused", "output_tokens_per_s")
SHOWN_STATISTICS: Final = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run.

    Attributes:
        latencies_s: By name, ascending.
        plain: By name, what is no latency.
    """

    latencies_s: dict[str, list[float]] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        """A figure such as `ttft_p99`, by nearest rank; None where no request has it."""
        if name in self.plain:
            return self.plain[name]
        latency, _, statistic = name.partition("_")
        samples = self.latencies_s.get(latency)
        if not samples:
            return None
        if statistic == "mean":
            return sum(samples) / len(samples)
        if statistic == "max":
            return samples[-1]
        rank = ceil(round(float(statistic[1:]) * len(samples) / 100, 6))
        return samples[min(max(rank, 1), len(samples)) - 1]

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        named: dict[str, object] = {
            f"{latency}_s": {name: self.value(f"{latency}_{name}") for name in SHOWN_STATISTICS}
            for latency in LATENCIES
        }
        return named | self.plain


def figures_of(outcomes: Iterable[Outcome | None], span_s: float | None = None) -> Figures:
    """The figures of a run; None stands for a refused request. `span_s`: From the first arrival to the last end."""
    found = list(outcomes)
    known = [one for one in found if one is not None]
    columns = {
        "ttft": [one.ttft_s for one in known if one.ttft_s is not None],
        "tpot": [one.tpot_s for one in known if one.tpot_s is not None],
        "e2e": [one.e2e_s for one in known if one.ttft_s is not None],
        "queue": [one.queue_s for one in known if one.queue_s is not None],
    }
    num_tokens = sum(one.num_tokens for one in known)
    return Figures(
        {name: sorted(values) for name, values in columns.items()},
        {
            "preemptions": sum(one.num_preemptions for one in known),
            "refused": len(found) - len(known),
            "output_tokens_per_s": num_tokens / span_s if span_s else 0.0,
        },
    )
