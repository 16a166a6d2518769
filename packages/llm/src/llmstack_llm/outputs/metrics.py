"""Metrics of an offline run, as `LLM.get_metrics()` returns them."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass

from llmstack_llm.outputs.stats import IterationStats
from llmstack_types import EngineReady, SchedulerStats

PREFIX = "vllm:"


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure.

    Attributes:
        name: As a server exports it, without `_total`.
        labels: `model_name` and `engine`, and what tells figures of one name apart.
    """

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """The state after the last step."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters by place, from 0 on."""

    values: list[int]


# Counter to the total in `SchedulerStats`.
_TOTALS = {
    "num_preemptions": "num_preemptions", "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits", "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_draft_tokens",
}  # fmt: skip


class MetricsKeeper:
    """A `StatLogger` that adds up; counts of the front end are there with or without the engine core's statistics."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._scheduler_stats = SchedulerStats()
        self._tokens: Tally[str] = Tally()
        self._ends: Tally[str] = Tally()

    def log_engine_initialized(self, ready: EngineReady) -> None:
        pass

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        if scheduler_stats is not None:
            self._scheduler_stats = scheduler_stats
        self._tokens["prompt_tokens"] += iteration_stats.num_prompt_tokens
        self._tokens["prompt_tokens_cached"] += iteration_stats.num_cached_tokens
        self._tokens["generation_tokens"] += iteration_stats.num_generation_tokens
        self._ends.update(finished.finish_reason for finished in iteration_stats.finished_requests)
        self._ends["abort"] += iteration_stats.num_aborted
        self._ends["error"] += iteration_stats.num_failed

    def metrics(self) -> list[Metric]:
        stats = self._scheduler_stats
        found: list[Metric] = [
            self._gauge("num_requests_running", stats.num_running),
            self._gauge("num_requests_waiting", stats.num_waiting),
            self._gauge("kv_cache_usage_perc", stats.kv_cache_usage),
        ]
        found += [self._counter(name, count) for name, count in self._tokens.items()]
        found += [self._counter(name, getattr(stats, field)) for name, field in _TOTALS.items()]
        found += [
            self._counter("request_success", count, finished_reason=reason) for reason, count in self._ends.items()
        ]
        places = list(stats.num_accepted_draft_tokens_per_place)
        return [*found, Vector(f"{PREFIX}spec_decode_num_accepted_tokens_per_pos", self._labels, places)]

    def _counter(self, name: str, value: int, **labels: str) -> Counter:
        return Counter(PREFIX + name, {**self._labels, **labels}, value)

    def _gauge(self, name: str, value: float) -> Gauge:
        return Gauge(PREFIX + name, self._labels, value)
