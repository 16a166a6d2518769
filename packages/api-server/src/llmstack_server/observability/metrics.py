"""Prometheus metrics of a server, under `llmstack:` names with `vllm:` aliases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from llmstack_llm.media.processor import MediaStats
from llmstack_llm.outputs.stats import IterationStats
from llmstack_llm.speech.served import Speech
from llmstack_server.observability.engine_metrics import EngineFamilies, EngineMetrics
from llmstack_server.observability.histograms import HistogramFamily
from llmstack_server.observability.idle_metrics import IdleCounts, IdleMetrics
from llmstack_server.observability.media_metrics import MediaMetrics, SpeechMetrics
from llmstack_server.observability.metric_aliases import PREFIX, render
from llmstack_server.observability.metrics_merge import Merged, Snapshot, snapshot_of
from llmstack_server.observability.shadow_metrics import ShadowMetrics, WithoutShadow
from llmstack_types import EngineReady, SchedulerStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
_HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_RATIO_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_ERROR_BUCKETS = (
    -30.0, -10.0, -2.5, -1.0, -0.5, -0.25, -0.1, -0.05, -0.02, -0.005, 0.0,
    0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0,
)  # fmt: skip
_REFUSAL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# The options whose limits refuse requests; all exist from the start, so that rates include the first refusal.
_REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens", "tokenization", "max_queue_wait", "deadline")
# A stream that is refused only ends with its connection; an abandoned one was ended without a reader.
_STREAM_OUTCOMES = ("started", "joined", "resumed", "refused", "abandoned")

_PARSER_MODES = ("streaming", "non_streaming")
_PARSER_OUTCOMES = ("tool_call", "no_tool_call")
_PARSER_REQUESTS = ("chat_completions", "responses", "other")

_QUEUE_GAUGES = (
    ("predicted_queue_wait_seconds", "Predicted wait of a new request that waits for all others."),
    ("queue_drain_tokens_per_second", "Tokens that are admitted per second while requests wait, as measured."),
)


class ServerMetrics:
    """The metrics of one server in its own registry; a `StatLogger` of the engine front end.

    Attributes:
        shadows: The metrics of shadow schedulers.
    """

    def __init__(
        self,
        model_name: str,
        *,
        has_aliases: bool = True,
        has_engine_families: bool = True,
        cache_facts: Mapping[str, str] | None = None,
    ) -> None:
        """`model_name`: Empty for a server before several models: what is of a model comes from that model then.

        `cache_facts`: Labels of `cache_config_info` that only the configuration knows.

        `has_engine_families`: False leaves out all families about engines, for engines without statistics.
        """
        self._registry = CollectorRegistry()
        self._has_aliases = has_aliases
        self._model_name = model_name
        self._cache_facts = cache_facts or {}
        self._of_model = self._registry if model_name else CollectorRegistry()
        self._families = EngineFamilies(self._of_model if has_engine_families else CollectorRegistry())
        self._engines: dict[int, EngineMetrics] = {}
        self.shadows = ShadowMetrics(self._of_model, model_name)
        self.engine(0)
        self._make_server_metrics()
        self._make_prediction_metrics()

    def _make_prediction_metrics(self) -> None:
        registry = self._of_model
        self._prediction_ratios = HistogramFamily(
            f"{PREFIX}ttft_prediction_error_ratio",
            "Difference of predicted and real time to the first token, over the real one.",
            ("model_name",), _RATIO_BUCKETS, registry,
        ).labels(self._model_name)  # fmt: skip
        self._prediction_errors = HistogramFamily(
            f"{PREFIX}ttft_prediction_error_seconds", "Real time to the first token less the predicted one.",
            ("model_name",), _ERROR_BUCKETS, registry,
        ).labels(self._model_name)  # fmt: skip
        self._refusals = HistogramFamily(
            f"{PREFIX}refusal_seconds",
            "From the last bytes of the headers to the refusal by a predicted first token.",
            ("model_name",), _REFUSAL_BUCKETS, registry,
        ).labels(self._model_name)  # fmt: skip

    def _make_server_metrics(self) -> None:
        registry = self._registry
        self.unknown_parameters = Counter(
            f"{PREFIX}unknown_request_parameters", "Request fields that were ignored.", registry=registry
        )
        self._http_requests = Counter(
            f"{PREFIX}http_requests", "HTTP requests by route and status; 499: the client left.",
            ("method", "route", "status"), registry=registry,
        )  # fmt: skip
        self._http_durations = HistogramFamily(
            f"{PREFIX}http_request_duration_seconds", "From the headers of a request to the end of its answer.",
            ("method", "route"), _HTTP_BUCKETS, registry,
        )  # fmt: skip
        self._rejections = Counter(
            f"{PREFIX}admission_rejections", "Requests refused because a queue was full, by the option that limits it.",
            ("model_name", "reason"), registry=self._of_model,
        )  # fmt: skip
        self._streams = Counter(
            f"{PREFIX}resumable_streams",
            "Requests with Idempotency-Key or x-llmstack-resume, and later readers, by what became of them.",
            ("model_name", "outcome"),
            registry=self._of_model,
        )
        self._tool_parsing = Counter(
            f"{PREFIX}tool_call_parser_invocations",
            "Texts that a parser of tool calls has read: a whole choice, or what is new of a streamed one.",
            ("model_name", "mode", "outcome", "request_type"),
            registry=self._of_model,
        )
        for values in itertools.product(_PARSER_MODES, _PARSER_OUTCOMES, _PARSER_REQUESTS):
            self._tool_parsing.labels(self._model_name, *values)
        self._queue_gauges = [
            Gauge(PREFIX + name, text, ("model_name",), registry=self._of_model) for name, text in _QUEUE_GAUGES
        ]
        for reason in _REJECTION_REASONS:
            self._rejections.labels(self._model_name, reason)
        self._outcome_to_streams = {
            outcome: self._streams.labels(self._model_name, outcome) for outcome in _STREAM_OUTCOMES
        }
        self.lifecycle_state = Gauge(
            f"{PREFIX}lifecycle_state", "1 for the current state.", ("state",), registry=registry
        )
        self.startup_seconds = Gauge(
            f"{PREFIX}startup_seconds", "Duration of each stage of the start.", ("stage",), registry=registry
        )
        self._engine_restarts = Counter(
            f"{PREFIX}engine_restarts", "Engine cores that ended and were replaced.", registry=registry
        )
        self._num_engine_restarts = self._num_unmoved = 0
        self._unmoved = Counter(
            f"{PREFIX}unmoved_requests",
            "Requests of a lost engine core that waited, since the others compute different bits.",
            registry=registry,
        )
        self.stuck_requests = Gauge(
            f"{PREFIX}num_requests_stuck", "Requests without progress for longer than --stuck-request-timeout.",
            registry=registry,
        )  # fmt: skip

    def engine(self, index: int) -> EngineMetrics:
        """The metrics of the engine core with this index."""
        if index not in self._engines:
            self._engines[index] = EngineMetrics(self._families, self._model_name, index)
        return self._engines[index]

    def log_engine_initialized(self, ready: EngineReady) -> None:
        """Sets the size of the KV cache."""
        self.engine(ready.engine_index).note_ready(ready, self._cache_facts)

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Adds the figures of one step."""
        engine = self._engines.get(iteration_stats.engine_index) or self.engine(iteration_stats.engine_index)
        engine.record(scheduler_stats, iteration_stats)
        if iteration_stats.shadow is not None:
            self.shadows.record(iteration_stats.engine_index, iteration_stats.shadow)

    def count_http(self, method: str, route: str, status: int, duration_s: float) -> None:
        """Counts an answered request."""
        self._http_requests.labels(method, route, str(status)).inc()
        self._http_durations.labels(method, route).observe(duration_s)

    def observe_prediction(self, predicted_s: float, real_s: float) -> None:
        """Compares a predicted time to the first token with the real one."""
        error_s = real_s - predicted_s
        self._prediction_errors.observe(error_s)
        if real_s > 0:
            self._prediction_ratios.observe(abs(error_s) / real_s)

    def observe_refusal(self, seconds: float) -> None:
        """Notes how long a request that is refused by prediction has waited since its headers came."""
        self._refusals.observe(seconds)

    def count_rejection(self, reason: str) -> None:
        """Counts a request that was refused because a queue was full."""
        self._rejections.labels(self._model_name, reason).inc()

    def count_tool_parsing(self, request_type: str, *, is_stream: bool, has_calls: bool) -> None:
        """Counts a text that a parser of tool calls has read, and whether it had a call."""
        mode, outcome = _PARSER_MODES[not is_stream], _PARSER_OUTCOMES[not has_calls]
        self._tool_parsing.labels(self._model_name, mode, outcome, request_type).inc()

    def count_stream(self, outcome: str) -> None:
        """Counts a request whose answer may outlive its connection, or what became of it."""
        self._outcome_to_streams[outcome].inc()

    def follow_media(self, read: Callable[[], MediaStats | None]) -> None:
        """Adds the counts of media that `read` returns; see `MediaMetrics`."""
        self._registry.register(MediaMetrics(self._model_name, read))

    def follow_speech(self, read: Callable[[], Speech | None]) -> None:
        """Adds the counts of what `read` returns; see `SpeechMetrics`."""
        self._registry.register(SpeechMetrics(self._model_name, read))

    def add(self, collector: Collector) -> None:
        """Adds the families that a collector has."""
        self._registry.register(collector)

    def follow_idle(self, idle: IdleCounts) -> None:
        """Adds the counts of an engine that sleeps while nothing uses it."""
        self._registry.register(IdleMetrics(self._model_name, idle))

    def set_queue(self, predicted_wait_s: float | None, tokens_per_s: float | None) -> None:
        """Sets what is predicted of the queue; nothing before a rate was measured."""
        for gauge, value in zip(self._queue_gauges, (predicted_wait_s, tokens_per_s), strict=True):
            if value is not None:
                gauge.labels(self._model_name).set(value)

    def note_engine_restarts(self, total: int) -> None:
        """Counts replaced engine cores; `total` is their number since the start of the engine."""
        self._engine_restarts.inc(total - min(self._num_engine_restarts, total))  # another engine counts from 0
        self._num_engine_restarts = total

    def note_unmoved_requests(self, total: int) -> None:
        """Counts requests that could not move; `total` is their number since the start of the engine."""
        self._unmoved.inc(total - min(self._num_unmoved, total))
        self._num_unmoved = total

    def set_lifecycle_state(self, state: str) -> None:
        """Sets the current lifecycle state."""
        self.lifecycle_state.clear()
        self.lifecycle_state.labels(state).set(1)

    def set_sleep_level(self, level: int) -> None:
        """Sets the sleep level of all engines."""
        for engine in self._engines.values():
            engine.set_sleep_level(level)

    def set_adapter_use(self, max_loras: int, running: Sequence[str], waiting: Sequence[str]) -> None:
        """Sets the adapters of the requests in flight; nothing where none has one."""
        gauge = self._families.lora_requests
        gauge.clear()
        if running or waiting:
            gauge.labels(str(max_loras), ",".join(waiting), ",".join(running)).set_to_current_time()

    def load_values(self) -> dict[str, float]:
        """The load as routers ask for it: the fullest engine's KV cache, and the waiting requests of all."""
        states = [engine.load for engine in self._engines.values()]
        return {
            "kv_cache_usage_perc": max(usage for usage, _ in states),
            "num_requests_waiting": float(sum(num_waiting for _, num_waiting in states)),
        }

    def snapshot(self) -> Snapshot:
        """The values that another process of this server needs to render the metrics of both."""
        self._update()
        return snapshot_of(self._registry)

    def render(self, peers: Sequence[Snapshot] = (), *, is_operator: bool = True) -> bytes:
        """The text format; `peers` are the snapshots of the server's other processes.

        `is_operator`: Whether the reader may see what shadow schedulers have found.
        """
        self._update()
        source = Merged(self._registry, peers) if peers else self._registry
        return render(source if is_operator else WithoutShadow(source), has_aliases=self._has_aliases)

    def _update(self) -> None:
        """Sets the families of all engines to the figures of their last steps."""
        for engine in self._engines.values():
            engine.update()
