"""Metrics of several API processes, merged into those of one server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric

from llmstack_server.observability.metric_aliases import PREFIX
from llmstack_server.observability.shadow_metrics import NAMES as SHADOW_NAMES

Snapshot = list[list[Any]]
"""Families as name, text, type, unit and samples, each a name, labels and a value: plain data that travels as JSON."""

# Every process receives the engine's totals, so the greatest value is the latest. Values per step are complete in
# the first process, which receives every step.
_SENT_TO_ALL = frozenset(
    PREFIX + name
    for name in (
        "engine_restarts", "engine_steps", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits",
        "prefix_tokens_without_state", "prefix_cache_audit",
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos", "step_phase_seconds", "iteration_tokens_total",
    )
) | SHADOW_NAMES  # fmt: skip
_SUMMED_GAUGES = frozenset({f"{PREFIX}num_requests_stuck"})
_Key = tuple[str, tuple[tuple[str, str], ...]]
_Rule = Callable[[float, float], float]


class Source(Protocol):
    """A collector of metric families."""

    def collect(self) -> Iterable[Metric]: ...


def snapshot_of(source: Source) -> Snapshot:
    """The families of `source` in a form that can be sent to another process."""
    return [
        [
            family.name, family.documentation, family.type, family.unit,
            [[sample.name, sample.labels, sample.value] for sample in family.samples],
        ]
        for family in source.collect()
    ]  # fmt: skip


class Merged:
    """Metrics of this process and others: counters and histograms are summed, gauges are its own where it has them."""

    def __init__(self, source: Source, snapshots: Sequence[Snapshot]) -> None:
        self._source = source
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """The merged families, each once."""
        name_to_family: dict[str, Sequence[Any]] = {}
        name_to_samples: dict[str, dict[_Key, float]] = {}
        for entry in chain(snapshot_of(self._source), *self._snapshots):
            name, _, kind, _, _ = name_to_family.setdefault(entry[0], entry)
            _merge_into(name_to_samples.setdefault(name, {}), _samples_of(entry), _rule_of(name, kind))
        for name, (_, text, kind, unit, _) in name_to_family.items():
            family = Metric(name, text, kind, unit)
            for (sample_name, labels), value in name_to_samples[name].items():
                family.add_sample(sample_name, dict(labels), value)
            yield family


def _samples_of(entry: Sequence[Any]) -> dict[_Key, float]:
    return {(name, tuple(sorted(labels.items()))): value for name, labels, value in entry[4]}


def _merge_into(samples: dict[_Key, float], others: Mapping[_Key, float], rule: _Rule) -> None:
    for key, value in others.items():
        if key not in samples:
            samples[key] = value
        elif key[0].endswith("_created"):
            samples[key] = min(samples[key], value)
        else:
            samples[key] = rule(samples[key], value)


def _rule_of(name: str, kind: str) -> _Rule:
    if name in _SENT_TO_ALL:
        return max
    if kind in ("counter", "histogram", "summary") or name in _SUMMED_GAUGES:
        return lambda ours, theirs: math.fsum((ours, theirs))
    return lambda ours, theirs: ours
