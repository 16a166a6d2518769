"""Prometheus metrics in a registry of their own, under `llmstack:` names with `vllm:` aliases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from llmstack_llm.stats import FinishedRequestStats, IterationStats
from llmstack_types import EngineReady, SchedulerStats

PREFIX = "llmstack:"
ALIAS_PREFIX = "vllm:"
CONTENT_TYPE = CONTENT_TYPE_LATEST

_ENGINE_LABELS = ("model_name", "engine")
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN_TIME_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_TIME_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class ServerMetrics:
    """The metrics of one server; a `StatLogger` of the engine front end."""

    def __init__(self, model_name: str, *, has_aliases: bool = True) -> None:
        self._registry = CollectorRegistry()
        self._has_aliases = has_aliases
        self._labels = (model_name, "0")
        self._scheduler = _SchedulerCounters()
        self.unknown_parameters = Counter(
            f"{PREFIX}unknown_request_parameters", "Request fields that were ignored.", registry=self._registry
        )
        self.http_requests = Counter(
            f"{PREFIX}http_requests", "HTTP requests by route and status; 499: the client left.",
            ("method", "route", "status"), registry=self._registry,
        )  # fmt: skip
        self.lifecycle_state = Gauge(
            f"{PREFIX}lifecycle_state", "1 for the current state.", ("state",), registry=self._registry
        )
        self.startup_seconds = Gauge(
            f"{PREFIX}startup_seconds", "Duration of each stage of the start.", ("stage",), registry=self._registry
        )
        self._make_engine_metrics()

    def _make_engine_metrics(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests that hold KV blocks.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that hold none.")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        self._preemptions = self._counter("num_preemptions", "Requests that lost their blocks to others.")
        self._queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Tokens found there.")
        self._make_speculation_metrics()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            f"{PREFIX}request_success", "Completions that ended, by reason.", (*_ENGINE_LABELS, "finished_reason"),
            registry=self._registry,
        )  # fmt: skip
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS)
        self._inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens.", _TOKEN_TIME_BUCKETS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean of one request, after the first.", _TOKEN_TIME_BUCKETS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_TIME_BUCKETS
        )
        self._num_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _COUNT_BUCKETS)
        self._num_generated = self._histogram("request_generation_tokens", "Tokens of a completion.", _COUNT_BUCKETS)
        self._n = self._histogram("request_params_n", "The parameter n.", (1, 2, 5, 10, 20))
        self._max_tokens = self._histogram("request_params_max_tokens", "The parameter max_tokens.", _COUNT_BUCKETS)
        self._iteration = self._histogram("iteration_tokens_total", "Tokens of one step.", _STEP_BUCKETS)
        self._cache_config = Gauge(
            f"{PREFIX}cache_config_info", "The KV cache; always 1.",
            (*_ENGINE_LABELS, "block_size", "num_gpu_blocks"), registry=self._registry,
        )  # fmt: skip

    def _make_speculation_metrics(self) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Rows with draft tokens.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens computed.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens that were right.")
        self._accepted_per_place = Counter(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos", "The same, by their place in the row from 0 on.",
            (*_ENGINE_LABELS, "position"), registry=self._registry,
        )  # fmt: skip
        self._acceptance_rate = self._gauge(
            "spec_decode_draft_acceptance_rate", "Share of the draft tokens that were right, since the start."
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, _ENGINE_LABELS, registry=self._registry).labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, _ENGINE_LABELS, registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, _ENGINE_LABELS, buckets=tuple(buckets), registry=self._registry)
        return histogram.labels(*self._labels)

    def log_engine_initialized(self, ready: EngineReady) -> None:
        """Notes the size of the KV cache."""
        self._cache_config.labels(*self._labels, str(ready.block_size), str(ready.num_blocks)).set(1)

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Takes over one step's figures."""
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
        self._prompt_tokens.inc(iteration_stats.num_prompt_tokens)
        self._cached_tokens.inc(iteration_stats.num_cached_tokens)
        self._generation_tokens.inc(iteration_stats.num_generation_tokens)
        for seconds in iteration_stats.time_to_first_tokens_s:
            self._ttft.observe(seconds)
        for seconds in iteration_stats.inter_token_latencies_s:
            self._inter_token.observe(seconds)
        for finished in iteration_stats.finished_requests:
            self._record_finished(finished)

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._usage.set(stats.kv_cache_usage)
        if stats.num_scheduled_tokens:
            self._iteration.observe(stats.num_scheduled_tokens)
        growth = self._scheduler.growth(stats)
        self._preemptions.inc(growth.num_preemptions)
        self._queries.inc(growth.prefix_cache_queries)
        self._hits.inc(growth.prefix_cache_hits)
        if stats.num_draft_tokens:
            self._record_speculation(stats, growth)

    def _record_speculation(self, stats: SchedulerStats, growth: SchedulerStats) -> None:
        self._drafts.inc(growth.num_drafts)
        self._draft_tokens.inc(growth.num_draft_tokens)
        self._accepted.inc(growth.num_accepted_draft_tokens)
        for place, num_accepted in enumerate(growth.num_accepted_draft_tokens_per_place):
            self._accepted_per_place.labels(*self._labels, str(place)).inc(num_accepted)
        self._acceptance_rate.set(stats.num_accepted_draft_tokens / stats.num_draft_tokens)

    def _record_finished(self, finished: FinishedRequestStats) -> None:
        self._success.labels(*self._labels, finished.finish_reason).inc()
        self._e2e.observe(finished.e2e_latency_s)
        self._num_prompt.observe(finished.num_prompt_tokens)
        self._num_generated.observe(finished.num_generation_tokens)
        self._n.observe(finished.n)
        if finished.max_tokens is not None:
            self._max_tokens.observe(finished.max_tokens)
        if finished.mean_time_per_output_token_s is not None:
            self._per_token.observe(finished.mean_time_per_output_token_s)

    def set_lifecycle_state(self, state: str) -> None:
        """Notes where the server is."""
        self.lifecycle_state.clear()
        self.lifecycle_state.labels(state).set(1)

    def render(self) -> bytes:
        """The text format."""
        collector = _WithAliases(self._registry) if self._has_aliases else self._registry
        return generate_latest(collector)


_COUNTERS = (
    "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "num_drafts", "num_draft_tokens",
    "num_accepted_draft_tokens",
)  # fmt: skip


class _SchedulerCounters:
    """Turns the engine's totals into growth, since a Prometheus counter can only be added to."""

    def __init__(self) -> None:
        self._last = SchedulerStats()

    def growth(self, stats: SchedulerStats) -> SchedulerStats:
        """The difference to the last step's totals."""
        last, self._last = self._last, stats
        grown = {name: max(getattr(stats, name) - getattr(last, name), 0) for name in _COUNTERS}
        places = zip_longest(
            stats.num_accepted_draft_tokens_per_place, last.num_accepted_draft_tokens_per_place, fillvalue=0
        )
        growths = tuple(max(total - before, 0) for total, before in places)
        return stats._replace(**grown, num_accepted_draft_tokens_per_place=growths)


class _WithAliases:
    """Every metric twice: under our name, and under vLLM's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """All metrics of the registry, then their aliases."""
        metrics = list(self._registry.collect())
        yield from metrics
        for metric in metrics:
            alias = Metric(_alias(metric.name), metric.documentation, metric.type, metric.unit)
            alias.samples = [sample._replace(name=_alias(sample.name)) for sample in metric.samples]
            yield alias


def _alias(name: str) -> str:
    return ALIAS_PREFIX + name.removeprefix(PREFIX)
