"""Metrics of an engine that sleeps while nothing uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from llmstack_server.observability.metric_aliases import PREFIX

_TEXTS = {
    "idle_sleeps": "How often the engine has fallen asleep since nothing used it.",
    "idle_wakes": "How often a request has woken it.",
    "idle_wake_seconds": "Seconds that requests have waited for it to wake, each wake once.",
}


class IdleCounts(Protocol):
    """The sleeps and wakes of an engine, and the seconds of the wakes, since the start."""

    num_sleeps: int
    num_wakes: int
    wake_s: float


class IdleMetrics:
    """A collector of the sleeps and wakes of one engine."""

    def __init__(self, model_name: str, idle: IdleCounts) -> None:
        self._model_name = model_name
        self._idle = idle

    def collect(self) -> Iterator[Metric]:
        """The counts as they are now, each family once."""
        idle = self._idle
        values = (idle.num_sleeps, idle.num_wakes, idle.wake_s)
        for (name, text), value in zip(_TEXTS.items(), values, strict=True):
            family = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
            family.add_metric((self._model_name,), value)
            yield family
