"""Figures about steps and requests, and who receives them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmstack_types import BlockEviction, EngineReady, SchedulerStats, ShadowReport, StepPhases

logger = logging.getLogger(__name__)


def between(start_s: float | None, end_s: float | None) -> float | None:
    """The seconds between two times; None where one of them is."""
    return None if start_s is None or end_s is None else max(end_s - start_s, 0.0)


@dataclass(frozen=True, slots=True)
class FinishedRequestStats:
    """One completion, when it has ended; seconds.

    Attributes:
        finish_reason: `stop`, `length`, `abort` or `error`.
        e2e_latency_s: From arrival to the last token.
        time_to_first_token_s: From arrival; None if it ended without a token.
        mean_time_per_output_token_s: After the first; None with fewer than two tokens.
        queue_time_s: From arrival to its first place in a step; this one and those below are None where the engine
            core keeps no statistics.
        prefill_time_s: From there to the first token.
        decode_time_s: From the first token to the last.
        inference_time_s: The two together.
        num_preemptions: How often it lost its blocks to others.
    """

    finish_reason: str
    e2e_latency_s: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int = 0
    max_tokens: int | None = None
    time_to_first_token_s: float | None = None
    mean_time_per_output_token_s: float | None = None
    queue_time_s: float | None = None
    prefill_time_s: float | None = None
    decode_time_s: float | None = None
    inference_time_s: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class IterationStats:
    """Figures of one step in the front end.

    Attributes:
        timestamp_s: End of the step, in monotonic seconds.
        engine_index: Which of several engine cores it was.
        num_prompt_tokens: Prompt tokens of the requests whose first token came in this step.
        num_cached_tokens: How many of those were found in the prefix cache.
        num_generation_tokens: Tokens sampled.
        time_to_first_tokens_s: One per request whose first token came.
        inter_token_latencies_s: One per further token of a request.
        finished_requests: The completions that ended by themselves.
        whole_requests: For each request whose last completion has ended so, `n` and the tokens of its longest one.
        num_aborted: Completions that were aborted since the last step.
        num_failed: Completions that ended with an error.
        num_corrupted: Failed completions whose logits were not usable.
        phases: The times of the step's phases; None where the engine core keeps no statistics.
        block_evictions: KV blocks of the sample that have lost what they held.
        shadow: The report of the shadow scheduler; None where it has nothing new.
        num_external_queries: Prompt tokens of the requests that named an export of another server.
        num_external_tokens: How many of those were imported.
        num_disk_tokens: Cached tokens that were read from disk.
    """

    timestamp_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_tokens_s: list[float] = field(default_factory=list)
    inter_token_latencies_s: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    whole_requests: list[tuple[int, int]] = field(default_factory=list)
    num_aborted: int = 0
    num_failed: int = 0
    num_corrupted: int = 0
    phases: StepPhases | None = None
    engine_index: int = 0
    block_evictions: Sequence[BlockEviction] = ()
    shadow: ShadowReport | None = None
    num_external_queries: int = 0
    num_external_tokens: int = 0
    num_disk_tokens: int = 0


class StatLogger(Protocol):
    """Receives the figures of every step, on the event loop, where it must not block; its errors are logged."""

    def log_engine_initialized(self, ready: EngineReady) -> None:
        """The engine core can take requests."""
        ...

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """One step has ended; `scheduler_stats` is None where the engine core keeps none."""
        ...


class LoggingStatLogger:
    """One line per interval: throughput, requests, use of the KV cache, hit rate. Quiet while nothing happens."""

    def __init__(self, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._since_s = clock()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_hits = 0
        self._num_queries = 0
        self._engine_index_to_stats: dict[int, SchedulerStats] = {}

    def log_engine_initialized(self, ready: EngineReady) -> None:
        """Says what the engine core came up with."""
        logger.info(
            "engine core ready: %d blocks of %d tokens, %s on %s, longest request %d tokens",
            ready.num_blocks, ready.block_size, ready.dtype, ready.device, ready.max_model_len,
        )  # fmt: skip
        self._since_s = self._clock()

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Adds up; logs once the interval is over.

        Of an engine core's totals it adds what is new; those of another one in its place begin at 0.
        """
        self._num_prompt_tokens += iteration_stats.num_prompt_tokens
        self._num_generation_tokens += iteration_stats.num_generation_tokens
        if (stats := scheduler_stats) is not None:
            last = self._engine_index_to_stats.get(iteration_stats.engine_index)
            if last is None or stats.step < last.step:
                last = SchedulerStats()
            self._num_queries += max(stats.prefix_cache_queries - last.prefix_cache_queries, 0)
            self._num_hits += max(stats.prefix_cache_hits - last.prefix_cache_hits, 0)
            self._engine_index_to_stats[iteration_stats.engine_index] = stats
        if self._clock() - self._since_s >= self._interval_s:
            self.tick()

    def tick(self) -> None:
        """Logs once the interval is over; called between steps too, so that the last line of a burst comes in time."""
        now_s = self._clock()
        if now_s - self._since_s < self._interval_s:
            return
        if self._num_prompt_tokens or self._num_generation_tokens:
            self._log(now_s - self._since_s)
        self._since_s = now_s

    def _log(self, elapsed_s: float) -> None:
        engines = list(self._engine_index_to_stats.values())
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache %.1f%%, hits %.1f%%",
            self._num_prompt_tokens / elapsed_s, self._num_generation_tokens / elapsed_s,
            sum(stats.num_running for stats in engines), sum(stats.num_waiting for stats in engines),
            100 * sum(stats.kv_cache_usage for stats in engines) / max(len(engines), 1),
            100 * self._num_hits / self._num_queries if self._num_queries else 0.0,
        )  # fmt: skip
        self._num_prompt_tokens = self._num_generation_tokens = self._num_hits = self._num_queries = 0


def announce_engine(stat_loggers: Sequence[StatLogger], ready: EngineReady) -> None:
    """Tells every logger that an engine core can take requests."""
    for stat_logger in stat_loggers:
        try:
            stat_logger.log_engine_initialized(ready)
        except Exception:  # (a user's logger must not keep the engine from its requests)
            logger.exception("a stat logger failed")


def record_all(
    stat_loggers: Sequence[StatLogger], scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats
) -> None:
    """Hands one step's figures to every logger."""
    for stat_logger in stat_loggers:
        try:
            stat_logger.record(scheduler_stats, iteration_stats)
        except Exception:  # (a user's logger must not end the requests of all users)
            logger.exception("a stat logger failed")
