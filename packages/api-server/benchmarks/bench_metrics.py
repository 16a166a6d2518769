"""What the metrics of one step cost the event loop, and what a scrape does."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.outputs.stats import IterationStats
from llmstack_server.observability.metrics import ServerMetrics
from llmstack_types import SchedulerStats, StepPhases


@pytest.mark.benchmark(group="metrics")
@pytest.mark.parametrize("num_rows", [1, 32, 256])
def test_record_a_step_of_decodes(benchmark: Any, num_rows: int) -> None:
    metrics = ServerMetrics("m")
    stats = IterationStats(
        num_generation_tokens=num_rows,
        inter_token_latencies_s=[0.01 + 0.0001 * row for row in range(num_rows)],
        phases=StepPhases(0.0001, 0.01, 0.0002),
    )
    scheduler_stats = SchedulerStats(num_running=num_rows, num_scheduled_tokens=num_rows, num_blocks=8)
    benchmark(lambda: metrics.record(scheduler_stats, stats))


@pytest.mark.benchmark(group="metrics")
def test_scrape(benchmark: Any) -> None:
    metrics = ServerMetrics("m")
    metrics.record(SchedulerStats(), IterationStats(num_generation_tokens=1, inter_token_latencies_s=[0.1]))
    benchmark(metrics.render)
