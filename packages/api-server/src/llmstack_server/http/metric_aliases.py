"""What is exported of the metrics: our names, and beside them those that dashboards made for other servers ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

PREFIX = "llmstack:"
ALIAS_PREFIX = "vllm:"
_HTTP = f"{PREFIX}http_"


class Source(Protocol):
    """What has metrics."""

    def collect(self) -> Iterable[Metric]: ...


class Exported:
    """Every metric under our name, and with aliases once more under the one that vLLM exports it by.

    Without the times at which counters were made, a sample each that nobody asks for.
    """

    def __init__(self, source: Source, *, has_aliases: bool) -> None:
        self._source = source
        self._has_aliases = has_aliases

    def collect(self) -> Iterator[Metric]:
        """All metrics, then their aliases."""
        metrics = list(map(_without_created, self._source.collect()))
        yield from metrics
        if not self._has_aliases:
            return
        for metric in metrics:
            yield _http_alias(metric) if metric.name.startswith(_HTTP) else _alias(metric)


def _without_created(metric: Metric) -> Metric:
    if metric.type in ("counter", "histogram"):
        metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return metric


def _alias(metric: Metric) -> Metric:
    return _renamed(
        metric, ALIAS_PREFIX, [sample._replace(name=_name(sample, ALIAS_PREFIX)) for sample in metric.samples]
    )


def _http_alias(metric: Metric) -> Metric:
    """Without a prefix, as FastAPI's instrumentator has it: `handler` for the route, statuses by the hundred."""
    totals: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in metric.samples:
        name, labels = _name(sample, ""), _http_labels(sample.labels)
        key = (name, frozenset(labels.items()))
        before = totals[key].value if key in totals else 0.0
        totals[key] = sample._replace(name=name, labels=labels, value=before + sample.value)
    return _renamed(metric, "", list(totals.values()))


def _http_labels(labels: dict[str, str]) -> dict[str, str]:
    renamed = {"handler" if name == "route" else name: value for name, value in labels.items()}
    if "status" in renamed:
        renamed["status"] = f"{renamed['status'][:1]}xx"
    return renamed


def _renamed(metric: Metric, prefix: str, samples: list[Sample]) -> Metric:
    alias = Metric(prefix + metric.name.removeprefix(PREFIX), metric.documentation, metric.type, metric.unit)
    alias.samples = samples
    return alias


def _name(sample: Sample, prefix: str) -> str:
    return prefix + sample.name.removeprefix(PREFIX)
