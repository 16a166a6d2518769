"""Metrics of engine cores and their requests, with a label for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge

from llmstack_llm.outputs.stats import FinishedRequestStats, IterationStats
from llmstack_server.observability.histograms import HistogramFamily
from llmstack_server.observability.metric_aliases import PREFIX
from llmstack_types import BlockEviction, DiskCacheStats, EngineReady, FinishReason, SchedulerStats
from llmstack_types.stats import COMPUTED_CAUSES, DISK_MISS_CAUSES

ENGINE_LABELS = ("model_name", "engine")
CACHE_LABELS = (
    "block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization",
)  # fmt: skip
PHASES = ("schedule", "execute", "update")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN_TIME_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_TIME_BUCKETS = (
    0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_COUNT_BUCKETS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))
_STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_GAUGES = {
    "num_requests_running": "Requests that hold KV blocks.",
    "num_requests_waiting": "Requests that wait for KV blocks.",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1.",
    "spec_decode_draft_acceptance_rate": "Share of the draft tokens that were accepted, since the start.",
    "encoder_cache_usage_perc": "Share of the encoder cache in use, 0 to 1.",
    "kv_cache_disk_bytes": "Size of the prefixes on disk (`--kv-cache-dir`).",
}
_COUNTERS = {
    "engine_steps": "Steps computed.",
    "num_preemptions": "Preemptions of requests.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "prefix_tokens_without_state": "Tokens found in the prefix cache, but computed again for want of a state.",
    "prompt_tokens": "Prompt tokens processed.",
    "prompt_tokens_cached": "Prompt tokens taken from the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "corrupted_requests": "Completions that ended because the model's logits were not finite.",
    "spec_decode_num_drafts": "Rows with draft tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens computed.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "external_prefix_cache_queries": "Tokens of prompts that another server has computed (`--kv-transfer-config`).",
    "external_prefix_cache_hits": "Tokens whose KV came from another server.",
    "mm_cache_queries": "Items of prompts, such as images, that were needed and not in the prefix cache.",
    "mm_cache_hits": "Those of them that were encoded already.",
    "encoder_items": "Items of prompts that were encoded.",
    "encoder_units": "Patches or frames of items that began to be encoded.",
    "encoder_evictions": "Encoded items that were evicted.",
    "kv_cache_disk_queries": "Requests whose prefix was looked up on disk, since memory had too little of it.",
    "kv_cache_disk_tokens": "Tokens whose KV was read from disk.",
    "kv_cache_disk_read_bytes": "KV read from disk.",
    "kv_cache_disk_written_bytes": "Files of KV written to disk.",
    "kv_cache_disk_dropped_files": "Files of KV that were not written, for want of room or since the disk failed.",
    "encoder_repeats": "Encoded items that were evicted though a running request needed them still.",
}
# Families with one more label; all of its values exist from the start.
_SPLIT_COUNTERS = {
    "prompt_tokens_by_source": (
        "Prompt tokens by where their KV came from.", ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prompt_tokens_cached_by_source": (
        "Prompt tokens from a cache, by where it is.", ("device", "host", "disk", "p2p", "external_unspecified"),
    ),
}  # fmt: skip
_AUDIT_RESULTS = {"agreeing_audits": "agrees", "differing_audits": "differs"}
_WAITING_REASONS = ("capacity", "deferred")
_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Between two tokens.", _TOKEN_TIME_BUCKETS),
    "request_time_per_output_token_seconds": ("Mean of one request, after the first.", _TOKEN_TIME_BUCKETS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _REQUEST_TIME_BUCKETS),
    "request_queue_time_seconds": ("From arrival to the first scheduled step.", _REQUEST_TIME_BUCKETS),
    "request_prefill_time_seconds": ("From the first scheduled step to the first token.", _REQUEST_TIME_BUCKETS),
    "request_decode_time_seconds": ("From the first token to the last.", _REQUEST_TIME_BUCKETS),
    "request_inference_time_seconds": ("From the first scheduled step to the last token.", _REQUEST_TIME_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _COUNT_BUCKETS),
    "request_generation_tokens": ("Tokens of a completion.", _COUNT_BUCKETS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest completion.", _COUNT_BUCKETS),
    "request_params_n": ("The parameter n.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("The parameter max_tokens.", _COUNT_BUCKETS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens computed, without cached ones.", _COUNT_BUCKETS),
    "request_num_preemptions": ("Preemptions of a completion.", (0, 1, 2, 3, 4, 5, 10)),
    "iteration_tokens_total": ("Tokens computed in one step, and first tokens sampled in it.", _STEP_BUCKETS),
}


_RESIDENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
)  # fmt: skip
# Measured with --kv-cache-metrics only; series appear with the first eviction.
_RESIDENCY = {
    "kv_block_lifetime_seconds": "How long a KV block kept its content, of a sample of the blocks.",
    "kv_block_idle_before_evict_seconds": "From the last use of a KV block to its eviction.",
    "kv_block_reuse_gap_seconds": "Between two uses of a KV block.",
}


class EngineFamilies:
    """The metric families, by name, of all engines of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def labels(*further: str) -> tuple[str, ...]:
            return (*ENGINE_LABELS, *further)

        self.gauges = {name: Gauge(PREFIX + name, text, labels(), registry=registry) for name, text in _GAUGES.items()}
        self.counters = {
            name: Counter(PREFIX + name, text, labels(), registry=registry) for name, text in _COUNTERS.items()
        }
        self.histograms = {
            name: HistogramFamily(PREFIX + name, text, labels(), bounds, registry)
            for name, (text, bounds) in _HISTOGRAMS.items()
        }
        self.residency = {
            name: HistogramFamily(PREFIX + name, text, labels(), _RESIDENCY_BUCKETS, registry)
            for name, text in _RESIDENCY.items()
        }
        self.split_counters = {
            name: Counter(PREFIX + name, text, labels("source"), registry=registry)
            for name, (text, _) in _SPLIT_COUNTERS.items()
        }
        self.waiting_by_reason = Gauge(
            f"{PREFIX}num_requests_waiting_by_reason", "Waiting requests; all of them wait for KV blocks or a row.",
            labels("reason"), registry=registry,
        )  # fmt: skip
        self.success = Counter(
            f"{PREFIX}request_success", "Completions that ended, by reason.", labels("finished_reason"),
            registry=registry,
        )  # fmt: skip
        self.accepted_per_place = Counter(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by position from 0 on.", labels("position"),
            registry=registry,
        )  # fmt: skip
        self.audits = Counter(
            f"{PREFIX}prefix_cache_audit", "Prefix hits that were computed again (`--audit-hits`), by result.",
            labels("result"), registry=registry,
        )  # fmt: skip
        self.disk_misses = Counter(
            f"{PREFIX}kv_cache_disk_misses", "Requests whose prefix was not on disk, or not to its end, by cause.",
            labels("cause"), registry=registry,
        )  # fmt: skip
        self.computed = Counter(
            f"{PREFIX}prompt_tokens_computed", "Tokens that requests compute when they begin or go on, by cause.",
            labels("cause"), registry=registry,
        )  # fmt: skip
        self.step_phases = Counter(
            f"{PREFIX}step_phase_seconds", "Time of steps, by phase.", labels("phase"), registry=registry
        )
        self.cache_config = Gauge(
            f"{PREFIX}cache_config_info", "The KV cache; always 1.", labels(*CACHE_LABELS), registry=registry
        )
        self.sleep_state = Gauge(
            f"{PREFIX}engine_sleep_state", "1 for the current state.", labels("sleep_state"), registry=registry
        )
        self.lora_requests = Gauge(
            f"{PREFIX}lora_requests_info", "Adapters of the requests in flight; the value is the time.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"), registry=registry,
        )  # fmt: skip


class EngineMetrics:
    """The metrics of one engine.

    `record` runs after every step, so it only keeps what is a sum or a state; `update` passes that on to the families
    before they are read. The values of histograms go there at once.
    """

    def __init__(self, families: EngineFamilies, model_name: str, engine_index: int) -> None:
        self._labels = (model_name, str(engine_index))
        self._families = families
        self._totals = _Totals()
        self._stats = SchedulerStats()
        self._phase_seconds = [0.0] * len(PHASES)
        self._num_generation_tokens = 0
        self._cache_values: tuple[str, ...] = ()
        self._gauges = {name: family.labels(*self._labels) for name, family in families.gauges.items()}
        self._counters = {name: family.labels(*self._labels) for name, family in families.counters.items()}
        self._histograms = {name: family.labels(*self._labels) for name, family in families.histograms.items()}
        self._phases = [families.step_phases.labels(*self._labels, phase) for phase in PHASES]
        self._split = {
            source: families.split_counters[name].labels(*self._labels, source)
            for name, (_, sources) in _SPLIT_COUNTERS.items()
            for source in sources
        }
        self._waiting = [families.waiting_by_reason.labels(*self._labels, reason) for reason in _WAITING_REASONS]
        for name, result in _AUDIT_RESULTS.items():
            self._counters[name] = families.audits.labels(*self._labels, result)
        self._disk_misses = [families.disk_misses.labels(*self._labels, cause) for cause in DISK_MISS_CAUSES]
        self._computed = [families.computed.labels(*self._labels, cause) for cause in COMPUTED_CAUSES]
        # All from the start, so that rates include the first one.
        self._ends = {reason.value: families.success.labels(*self._labels, reason.value) for reason in FinishReason}
        self.set_sleep_level(0)

    @property
    def load(self) -> tuple[float, int]:
        """The share of its KV blocks in use, and its waiting requests, after the last step."""
        return self._stats.kv_cache_usage, self._stats.num_waiting

    def set_sleep_level(self, level: int) -> None:
        """Sets the sleep level: 0 is awake, 1 without KV storage, 2 without weights too."""
        for number, state in enumerate(SLEEP_STATES):
            self._families.sleep_state.labels(*self._labels, state).set(number == level)

    def note_ready(self, ready: EngineReady, cache_facts: Mapping[str, str]) -> None:
        """Sets the facts about the KV cache; `cache_facts` has those that the engine core does not report, by label."""
        facts = {
            **dict.fromkeys(CACHE_LABELS, ""), "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_blocks), "cache_dtype": ready.kv_cache_dtype or ready.dtype, **cache_facts,
        }  # fmt: skip
        values = (*self._labels, *(facts[name] for name in CACHE_LABELS))
        if self._cache_values and self._cache_values != values:  # of the engine core before a reload
            self._families.cache_config.remove(*self._cache_values)
        self._cache_values = values
        self._families.cache_config.labels(*values).set(1)

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Adds the figures of one step."""
        counters, split, histograms = self._counters, self._split, self._histograms
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats, num_first_tokens=len(iteration_stats.time_to_first_tokens_s))
        if iteration_stats.phases is not None:
            for index, seconds in enumerate(iteration_stats.phases):
                self._phase_seconds[index] += max(seconds, 0.0)
        if iteration_stats.num_generation_tokens:
            self._num_generation_tokens += iteration_stats.num_generation_tokens
            histograms["inter_token_latency_seconds"].observe_all(iteration_stats.inter_token_latencies_s)
            histograms["time_to_first_token_seconds"].observe_all(iteration_stats.time_to_first_tokens_s)
        if num_prompt_tokens := iteration_stats.num_prompt_tokens:
            num_cached, num_external = iteration_stats.num_cached_tokens, iteration_stats.num_external_tokens
            counters["prompt_tokens"].inc(num_prompt_tokens)
            counters["prompt_tokens_cached"].inc(num_cached)
            split["local_compute"].inc(max(num_prompt_tokens - num_cached, 0))
            split["local_cache_hit"].inc(max(num_cached - num_external, 0))
            split["external_kv_transfer"].inc(num_external)
            counters["external_prefix_cache_queries"].inc(iteration_stats.num_external_queries)
            counters["external_prefix_cache_hits"].inc(num_external)
            split["device"].inc(num_cached - iteration_stats.num_disk_tokens)
            split["disk"].inc(iteration_stats.num_disk_tokens)
        if iteration_stats.block_evictions:
            self._record_evictions(iteration_stats.block_evictions)
        for finished in iteration_stats.finished_requests:
            self._record_finished(finished)
        for n, num_tokens in iteration_stats.whole_requests:
            histograms["request_params_n"].observe(n)
            histograms["request_max_num_generation_tokens"].observe(num_tokens)
        if iteration_stats.num_aborted or iteration_stats.num_failed:
            self._ends[FinishReason.ABORT.value].inc(iteration_stats.num_aborted)
            self._ends[FinishReason.ERROR.value].inc(iteration_stats.num_failed)
            counters["corrupted_requests"].inc(iteration_stats.num_corrupted)

    def update(self) -> None:
        """Sets the families to the figures of the last step."""
        stats, gauges, counters = self._stats, self._gauges, self._counters
        gauges["num_requests_running"].set(stats.num_running)
        gauges["num_requests_waiting"].set(stats.num_waiting)
        self._waiting[0].set(stats.num_waiting)
        gauges["kv_cache_usage_perc"].set(stats.kv_cache_usage)
        if stats.encoder is not None:
            gauges["encoder_cache_usage_perc"].set(stats.encoder.num_used_tokens / stats.encoder.num_cache_tokens)
        for name, growth in self._totals.growth(stats):
            counters[name].inc(growth)
        for counter, growth in zip(self._computed, self._totals.growth_per_cause(stats), strict=False):
            counter.inc(growth)
        if stats.disk is not None:
            gauges["kv_cache_disk_bytes"].set(stats.disk.num_bytes)
            for counter, growth in zip(self._disk_misses, self._totals.growth_per_miss(stats.disk), strict=True):
                counter.inc(growth)
        if stats.num_draft_tokens:
            gauges["spec_decode_draft_acceptance_rate"].set(stats.num_accepted_draft_tokens / stats.num_draft_tokens)
            for place, growth in enumerate(self._totals.growth_per_position(stats)):
                self._families.accepted_per_place.labels(*self._labels, str(place)).inc(growth)
        for counter, seconds in zip(self._phases, self._phase_seconds, strict=True):
            counter.inc(seconds)
        counters["generation_tokens"].inc(self._num_generation_tokens)
        self._phase_seconds, self._num_generation_tokens = [0.0] * len(PHASES), 0

    def _record_scheduler(self, stats: SchedulerStats, num_first_tokens: int) -> None:
        if stats.step < self._stats.step:  # another engine core, whose totals begin at 0
            self.update()
            self._totals = _Totals()
        self._stats = stats
        if stats.num_scheduled_tokens:
            # So the sum is that of prompt tokens, without cached ones, and of output tokens.
            self._histograms["iteration_tokens_total"].observe(stats.num_scheduled_tokens + num_first_tokens)

    def _record_evictions(self, evictions: Sequence[BlockEviction]) -> None:
        lifetime, idle, gap = (family.labels(*self._labels) for family in self._families.residency.values())
        for eviction in evictions:
            lifetime.observe(eviction.lifetime_s)
            idle.observe(eviction.idle_s)
            gap.observe_all(eviction.reuse_gaps_s)

    def _record_finished(self, finished: FinishedRequestStats) -> None:
        self._ends[finished.finish_reason].inc()
        for name, value in (
            ("e2e_request_latency_seconds", finished.e2e_latency_s),
            ("request_time_per_output_token_seconds", finished.mean_time_per_output_token_s),
            ("request_queue_time_seconds", finished.queue_time_s),
            ("request_prefill_time_seconds", finished.prefill_time_s),
            ("request_decode_time_seconds", finished.decode_time_s),
            ("request_inference_time_seconds", finished.inference_time_s),
            ("request_prompt_tokens", finished.num_prompt_tokens),
            ("request_generation_tokens", finished.num_generation_tokens),
            ("request_params_max_tokens", finished.max_tokens),
            ("request_prefill_kv_computed_tokens", finished.num_prompt_tokens - finished.num_cached_tokens),
            ("request_num_preemptions", finished.num_preemptions),
        ):
            if value is not None:
                self._histograms[name].observe(value)


# Counter to the total in `SchedulerStats`.
_TOTALS = {
    "engine_steps": "step", "num_preemptions": "num_preemptions", "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits", "prefix_tokens_without_state": "prefix_tokens_without_state",
    "spec_decode_num_drafts": "num_drafts", "agreeing_audits": "num_agreeing_audits",
    "differing_audits": "num_differing_audits",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_draft_tokens",
}  # fmt: skip
_fields_of = attrgetter(*_TOTALS.values())
_ENCODER_TOTALS = {
    "mm_cache_queries": "num_queries", "mm_cache_hits": "num_hits", "encoder_items": "num_encoded",
    "encoder_units": "num_units", "encoder_evictions": "num_evictions", "encoder_repeats": "num_repeats",
}  # fmt: skip
_encoder_fields_of = attrgetter(*_ENCODER_TOTALS.values())
_DISK_TOTALS = {
    "kv_cache_disk_queries": "num_requests", "kv_cache_disk_tokens": "num_tokens",
    "kv_cache_disk_read_bytes": "num_read_bytes", "kv_cache_disk_written_bytes": "num_written_bytes",
    "kv_cache_disk_dropped_files": "num_dropped",
}  # fmt: skip
_disk_fields_of = attrgetter(*_DISK_TOTALS.values())


class _Totals:
    """Differences of the engine's totals, since a Prometheus counter can only be added to."""

    def __init__(self) -> None:
        self._last: tuple[int, ...] = (0,) * len(_TOTALS)
        self._last_of_encoder: tuple[int, ...] = (0,) * len(_ENCODER_TOTALS)
        self._last_of_disk: tuple[int, ...] = (0,) * len(_DISK_TOTALS)
        self._last_misses = (0,) * len(DISK_MISS_CAUSES)
        self._last_per_place: tuple[int, ...] = ()
        self._last_computed: tuple[int, ...] = ()

    def growth(self, stats: SchedulerStats) -> list[tuple[str, int]]:
        """Counters that have grown since the last call, and by how much."""
        last, self._last = self._last, _fields_of(stats)
        grown = [*zip(_TOTALS, self._last, last, strict=True)]
        if stats.encoder is not None:
            last, self._last_of_encoder = self._last_of_encoder, _encoder_fields_of(stats.encoder)
            grown += zip(_ENCODER_TOTALS, self._last_of_encoder, last, strict=True)
        if stats.disk is not None:
            last, self._last_of_disk = self._last_of_disk, _disk_fields_of(stats.disk)
            grown += zip(_DISK_TOTALS, self._last_of_disk, last, strict=True)
        return [(name, new - old) for name, new, old in grown if new > old]

    def growth_per_miss(self, disk: DiskCacheStats) -> list[int]:
        """Growth of the misses on disk, by cause."""
        last, self._last_misses = self._last_misses, disk.num_misses
        return [max(new - old, 0) for new, old in zip(self._last_misses, last, strict=True)]

    def growth_per_cause(self, stats: SchedulerStats) -> list[int]:
        """Growth of the tokens that are computed, by cause."""
        last, self._last_computed = self._last_computed, stats.num_computed_tokens_per_cause
        return [max(new - old, 0) for new, old in zip_longest(self._last_computed, last, fillvalue=0)]

    def growth_per_position(self, stats: SchedulerStats) -> list[int]:
        """Growth of the accepted draft tokens, by position."""
        last, self._last_per_place = self._last_per_place, stats.num_accepted_draft_tokens_per_place
        return [max(new - old, 0) for new, old in zip_longest(self._last_per_place, last, fillvalue=0)]
