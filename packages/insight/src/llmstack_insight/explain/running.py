"""Estimates for a request of a running engine core."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from llmstack_core_scheduler import SchedulerConfig
from llmstack_insight.explain.deadlines import add_deadline
from llmstack_insight.explain.estimates import add_estimates
from llmstack_insight.explain.explanation import Explanation
from llmstack_insight.explain.what_if import Work
from llmstack_insight.explain.workload import workload_of_steps
from llmstack_step_log.control_plane import CacheConfig
from llmstack_types import EngineReady, StepRecording

# A running server computes these in about a second, beside its requests.
MAX_LIVE_ROWS = 32_768
MAX_LIVE_ROWS_IN_ALL = 163_840
# Beside many requests the same rows take longer, and the estimates slow those down.
MAX_LIVE_S = 2.0


def live_work() -> Work:
    """The limits of the estimates of a running server."""
    return Work(MAX_LIVE_ROWS, MAX_LIVE_ROWS_IN_ALL, time.monotonic() + MAX_LIVE_S)


def add_estimates_of_engine(
    made: Explanation, log: StepRecording, ready: EngineReady, settings: Mapping[str, Any], enable_prefix_caching: bool
) -> None:
    """As `add_deadline` and `add_estimates`, for an engine core of which the lengths of prompts are known.

    `settings`: Fields of its `SchedulerConfig`.
    """
    scheduler = SchedulerConfig(max_model_len=ready.max_model_len, **settings)
    cache = CacheConfig(ready.num_blocks, ready.block_size, enable_prefix_caching and ready.is_causal)
    workload = workload_of_steps(log, made.request_id)
    add_deadline(made, log, None if workload is None else workload.own, scheduler, cache)
    add_estimates(made, log, workload, scheduler, cache, live_work())
