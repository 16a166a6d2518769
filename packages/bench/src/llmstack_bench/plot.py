"""Draws runs: how latencies are distributed, and how they went over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmstack_bench.comparison import Server
from llmstack_bench.errors import BenchError
from llmstack_bench.metrics import latencies_ms

# More points than a picture has columns show nothing more.
MAX_POINTS = 400
SUFFIXES = (".html", ".png")


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram.

    Attributes:
        series: Label to its points.
        is_line: Points are joined.
    """

    title: str
    x_title: str
    y_title: str
    series: dict[str, list[tuple[float, float]]]
    is_line: bool = True


def check_plot_path(path: Path) -> None:
    """Raises BenchError before the run where the picture could not be drawn after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise BenchError(f"--plot {path}: must end with {' or '.join(SUFFIXES)}", exit_code=2)
    if path.suffix.lower() == ".png":
        from llmstack_bench.plot_png import check_available

        check_available()


def write_plot(path: Path, servers: Sequence[Server]) -> None:
    """Draws all runs of the servers into a file that ends with .html (which needs nothing else) or .png.

    Raises:
        BenchError: The file cannot be written.
    """
    panels = make_panels(servers)
    try:
        if path.suffix.lower() == ".png":
            from llmstack_bench.plot_png import write_png

            write_png(path, panels)
        else:
            from llmstack_bench.plot_html import to_html

            path.write_text(to_html(panels), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--plot {path}: {error.strerror}") from error


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
