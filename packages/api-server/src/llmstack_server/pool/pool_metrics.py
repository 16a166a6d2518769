"""Metrics of a server's models: states, loads, evictions and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from llmstack_server.observability.metric_aliases import PREFIX
from llmstack_server.pool.model_pool import ModelPool
from llmstack_server.pool.pooled_model import PooledModel

_COUNTERS = {
    "model_loads": "Loads of a model that have succeeded.",
    "model_load_failures": "Loads that have failed, and engines that have died.",
    "model_evictions": "How often a model has made room for another one.",
}
_GAUGES = {
    "model_memory_bytes": "Memory that a model counts with.",
    "model_load_seconds": "Seconds of the last load of a model.",
    "model_waiting_requests": "Requests that wait until a model is loaded.",
}


class PoolMetrics:
    """A collector of the models of a pool, by their names.

    `visible_models`: Those that the reader may see.
    """

    def __init__(self, pool: ModelPool, visible_models: Callable[[], Sequence[PooledModel]]) -> None:
        self._pool = pool
        self._visible_models = visible_models

    def collect(self) -> Iterator[Metric]:
        """The figures as they are now, each family once."""
        states = GaugeMetricFamily(PREFIX + "model_state", "1 for its state.", labels=("model_name", "state"))
        counters = [
            CounterMetricFamily(PREFIX + name, text, labels=("model_name",)) for name, text in _COUNTERS.items()
        ]
        gauges = [GaugeMetricFamily(PREFIX + name, text, labels=("model_name",)) for name, text in _GAUGES.items()]
        for model in self._visible_models():
            states.add_metric((model.name, str(model.status)), 1.0)
            counts = (model.num_loads, model.num_all_failures, model.num_evictions)
            values = (model.charged_bytes, model.load_s, model.waiting.num_requests)
            for counter, count in zip(counters, counts, strict=True):
                counter.add_metric((model.name,), float(count))
            for gauge, value in zip(gauges, values, strict=True):
                gauge.add_metric((model.name,), float(value))
        bound = GaugeMetricFamily(PREFIX + "models_memory_limit_bytes", "Memory that all models may use together.")
        bound.add_metric((), float(self._pool.memory_bytes))
        yield from (states, *counters, *gauges, bound)
