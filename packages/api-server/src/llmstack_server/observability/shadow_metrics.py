"""Metrics of a shadow scheduler, which operators alone see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric

from llmstack_server.observability.metric_aliases import PREFIX
from llmstack_types import ShadowFigures, ShadowReport

SHADOW_PREFIX: Final = f"{PREFIX}shadow_"
PLANES: Final = ("real", "unchanged", "shadow")
# Name of a counter to the field of `ShadowReport`, and its text.
_COUNTERS: Final = {
    "requests": ("num_requests", "Requests that were compared."),
    "shed": ("num_shed", "Steps and requests that the shadow had no time for."),
    "cpu_seconds": ("cpu_s", "Processor time of the shadow."),
}
# Name of a counter to the field of `ShadowFigures`, and its text.
_SUMS: Final = {
    "time_to_first_token_seconds": ("ttft_s", "Sum over the compared requests, by control plane."),
    "request_queue_time_seconds": ("queue_s", "Sum over the compared requests, by control plane."),
    "e2e_request_latency_seconds": ("e2e_s", "Sum over the compared requests, by control plane."),
    "num_preemptions": ("num_preemptions", "Preemptions of the compared requests, by control plane."),
}
NAMES: Final = frozenset(SHADOW_PREFIX + name for name in (*_COUNTERS, *_SUMS))


class _Source(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class WithoutShadow:
    """A collector without the families of shadows."""

    def __init__(self, source: _Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """The families of the source that are about anything else."""
        return (family for family in self._source.collect() if not family.name.startswith(SHADOW_PREFIX))


class ShadowMetrics:
    """The families of all engines' shadows. They appear with the first report.

    Attributes:
        reports: The last report of each engine core, by index.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.reports: dict[int, ShadowReport] = {}
        self._registry = registry
        self._model_name = model_name
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}

    def record(self, engine_index: int, report: ShadowReport) -> None:
        """Adds what has come since the last report of that engine core."""
        if not self._counters:
            self._make_families()
        last, self.reports[engine_index] = self.reports.get(engine_index), report
        if last is None or report.num_requests < last.num_requests or report.cpu_s < last.cpu_s:
            last = ShadowReport(report.name)  # the first, or of another process
        labels = (self._model_name, str(engine_index))
        for name, (field, _) in _COUNTERS.items():
            self._counters[name].labels(*labels).inc(getattr(report, field) - getattr(last, field))
        for plane in PLANES:
            new, old = getattr(report, plane), getattr(last, plane)
            for name, (field, _) in _SUMS.items():
                self._counters[name].labels(*labels, plane).inc(max(getattr(new, field) - getattr(old, field), 0))
        self._gauges["lag_seconds"].labels(*labels).set(report.lag_s)
        self._gauges["is_running"].labels(*labels, report.name).set(0 if report.problem else 1)

    def live_part(self, engine_index: int) -> dict[str, object] | None:
        """The shadow scheduler of an engine core as `/live` shows it; None without one."""
        report = self.reports.get(engine_index)
        return None if report is None else {"name": report.name, "sentences": sentences(report)}

    def _make_families(self) -> None:
        labels = ("model_name", "engine")
        plain = {name: (text, labels) for name, (_, text) in _COUNTERS.items()}
        by_plane = {name: (text, (*labels, "plane")) for name, (_, text) in _SUMS.items()}
        for name, (text, names) in {**plain, **by_plane}.items():
            self._counters[name] = Counter(SHADOW_PREFIX + name, text, names, registry=self._registry)
        for name, text, names in (
            ("lag_seconds", "How far the shadow is behind.", labels),
            ("is_running", "0 once the shadow has ended.", (*labels, "shadow")),
        ):
            self._gauges[name] = Gauge(SHADOW_PREFIX + name, text, names, registry=self._registry)


def sentences(report: ShadowReport) -> list[str]:
    """Sentences on the last requests of a report."""
    found = []
    if report.problem:
        found.append(f"It has ended: {report.problem}.")
    if not report.num_recent:
        found.append("No requests were compared yet.")
    else:
        found.append(_comparison(report, "ttft_s", "The first token"))
        found.append(_comparison(report, "e2e_s", "The whole answer"))
        found.append(_preemptions(report))
    if report.num_shed:
        found.append(f"It had no time for {report.num_shed} steps and requests.")
    found.append(f"It is {report.lag_s:.1f} s behind, and has taken {report.cpu_s:.1f} s of processor time.")
    return found


def _comparison(report: ShadowReport, field: str, what: str) -> str:
    def mean_ms(figures: ShadowFigures) -> float:
        return 1000 * float(getattr(figures, field)) / report.num_recent

    real, unchanged, shadow = map(mean_ms, (report.recent_real, report.recent_unchanged, report.recent_shadow))
    share = abs(shadow - unchanged) / unchanged if unchanged else 0.0
    word = "as early" if share < 0.01 else f"{100 * share:.0f} % {'earlier' if shadow < unchanged else 'later'}"
    return (
        f"{what} would have come {word}: after {shadow:.0f} ms rather than {unchanged:.0f} ms, both estimated, "
        f"over {report.num_recent} requests. It really came after {real:.0f} ms."
    )


def _preemptions(report: ShadowReport) -> str:
    real, unchanged, shadow = (
        "once" if figures.num_preemptions == 1 else f"{figures.num_preemptions} times"
        for figures in (report.recent_real, report.recent_unchanged, report.recent_shadow)
    )
    change = f"as often, {shadow}" if shadow == unchanged else f"{shadow} rather than {unchanged}"
    return f"It would have preempted {change}, both estimated. It really happened {real}."
