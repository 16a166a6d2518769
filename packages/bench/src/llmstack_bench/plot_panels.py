"""Diagrams of measured runs, before they are drawn: titles and points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmstack_bench.comparison import Server
from llmstack_bench.metrics import latencies_ms

# More points than a picture has columns show nothing more.
MAX_POINTS = 400


@dataclass(frozen=True, slots=True)
class Panel:
    """The content of one diagram.

    Attributes:
        series: Label to its points.
        is_line: Whether the points are connected.
    """

    title: str
    x_title: str
    y_title: str
    series: dict[str, list[tuple[float, float]]]
    is_line: bool = True


def make_panels(servers: Sequence[Server]) -> list[Panel]:
    """The diagrams of all servers, each over all repetitions together."""
    labelled = [
        (server.label, [r for run in server.runs for r in run.load.results if not r.error]) for server in servers
    ]
    latencies = {label: latencies_ms(results) for label, results in labelled}

    def distribution(metric: str, title: str) -> Panel:
        series = {label: cumulative(found[metric]) for label, found in latencies.items()}
        return Panel(title, "ms", "share of samples at or below", series)

    over_time = {label: thinned(sorted((r.start_s, r.e2e_s * 1000) for r in results)) for label, results in labelled}
    return [
        distribution("ttft", "Time to first token"),
        distribution("itl", "Inter-token latency"),
        Panel("End-to-end latency by start", "s since the run began", "ms", over_time, is_line=False),
    ]


def cumulative(samples: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of samples at or below it), ascending."""
    ordered = sorted(samples)
    return thinned([(value, number / len(ordered)) for number, value in enumerate(ordered, 1)])


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` of the points, evenly chosen; the first and the last stay."""
    if len(points) <= MAX_POINTS:
        return list(points)
    step = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(index * step)] for index in range(MAX_POINTS)]
