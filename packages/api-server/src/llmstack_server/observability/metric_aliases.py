"""Metrics as text: our names, and aliases for dashboards of other servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

PREFIX = "llmstack:"
ALIAS_PREFIX = "vllm:"
_HTTP = f"{PREFIX}http_"


class Source(Protocol):
    """A collector of metric families."""

    def collect(self) -> Iterable[Metric]: ...


class _Families:
    """A collector of families that were collected before."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(source: Source, *, has_aliases: bool) -> bytes:
    """Every metric as text under its own name, and with aliases also under the name of vLLM.

    The creation times of counters, one more sample each, are left out.
    """
    families = [_without_created(family) for family in source.collect()]
    http = [family for family in families if family.name.startswith(_HTTP)]
    others = generate_latest(_Families([family for family in families if not family.name.startswith(_HTTP)]))
    if not has_aliases:
        return others + generate_latest(_Families(http))
    # The text differs in the prefix only, and rendering it takes most of the time of a scrape.
    aliases = others.replace(PREFIX.encode(), ALIAS_PREFIX.encode())
    return others + aliases + generate_latest(_Families([*http, *map(_http_alias, http)]))


def _without_created(metric: Metric) -> Metric:
    if metric.type in ("counter", "histogram"):
        metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return metric


def _http_alias(metric: Metric) -> Metric:
    """The form of FastAPI's instrumentator: no prefix, `handler` for the route, statuses such as `2xx`."""
    totals: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in metric.samples:
        name, labels = sample.name.removeprefix(PREFIX), _http_labels(sample.labels)
        key = (name, frozenset(labels.items()))
        before = totals[key].value if key in totals else 0.0
        totals[key] = sample._replace(name=name, labels=labels, value=before + sample.value)
    alias = Metric(metric.name.removeprefix(PREFIX), metric.documentation, metric.type, metric.unit)
    alias.samples = list(totals.values())
    return alias


def _http_labels(labels: dict[str, str]) -> dict[str, str]:
    renamed = {"handler" if name == "route" else name: value for name, value in labels.items()}
    if "status" in renamed:
        renamed["status"] = f"{renamed['status'][:1]}xx"
    return renamed
