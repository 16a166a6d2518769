"""Metrics of several processes as those of one server."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmstack_llm.outputs.stats import FinishedRequestStats, IterationStats
from llmstack_server.observability.metrics import ServerMetrics
from llmstack_types import EngineReady, SchedulerStats, StepPhases

READY = EngineReady(64, 16, 128, 257, "float32", "cpu")


def metrics(*steps: tuple[SchedulerStats | None, IterationStats]) -> ServerMetrics:
    made = ServerMetrics("m")
    made.log_engine_initialized(READY)
    for stats, iteration in steps:
        made.record(stats, iteration)
    return made


def finished() -> IterationStats:
    return IterationStats(
        num_generation_tokens=5,
        num_prompt_tokens=3,
        time_to_first_tokens_s=[0.03],
        finished_requests=[FinishedRequestStats("stop", 1.5, 3, 5)],
    )


def samples(text: bytes) -> dict[str, float]:
    """Sample name, and the labels beside the model and engine 0, to its value."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if (k, v) not in (("model_name", "m"), ("engine", "0"))}
            found[sample.name + "".join(f" {key}={value}" for key, value in sorted(labels.items()))] = sample.value
    return found


def merged(ours: ServerMetrics, *others: ServerMetrics) -> dict[str, float]:
    snapshots = [json.loads(json.dumps(other.snapshot())) for other in others]  # as it travels
    return samples(ours.render(snapshots))


def test_what_each_process_has_counted_is_added_up():
    both = merged(metrics((None, finished())), metrics((None, finished()), (None, finished())))
    assert both["llmstack:generation_tokens_total"] == 15
    assert both["vllm:prompt_tokens_total"] == 9
    assert both["llmstack:request_success_total finished_reason=stop"] == 3
    assert both["llmstack:e2e_request_latency_seconds_count"] == 3
    assert both["llmstack:e2e_request_latency_seconds_sum"] == pytest.approx(4.5)
    assert both["llmstack:time_to_first_token_seconds_bucket le=0.04"] == 3
    assert both["llmstack:time_to_first_token_seconds_bucket le=0.02"] == 0


def test_what_the_engine_tells_every_process_counts_once():
    early = SchedulerStats(step=7, num_preemptions=1, prefix_cache_hits=10, num_scheduled_tokens=4)
    late = SchedulerStats(step=9, num_preemptions=3, prefix_cache_hits=30, num_scheduled_tokens=4)
    phases = StepPhases(0.1, 0.2, 0.3)
    sees_all = metrics((early, IterationStats(phases=phases)), (late, IterationStats(phases=phases)))
    sees_some = metrics((early, IterationStats(phases=phases)))
    for both in (merged(sees_all, sees_some), merged(sees_some, sees_all)):
        assert both["llmstack:engine_steps_total"] == 9
        assert both["llmstack:num_preemptions_total"] == 3
        assert both["llmstack:prefix_cache_hits_total"] == 30
        assert both["llmstack:iteration_tokens_total_count"] == 2
        assert both["llmstack:step_phase_seconds_total phase=execute"] == pytest.approx(0.4)


def test_a_restart_that_every_process_saw_counts_once():
    processes = [metrics() for _ in range(3)]
    for process in processes:
        process.note_engine_restarts(2)
    replaced = metrics()  # has begun later, and saw none
    assert merged(*processes, replaced)["llmstack:engine_restarts_total"] == 2


def test_a_gauge_is_that_of_the_process_that_answers():
    busy = metrics((SchedulerStats(num_running=3, num_waiting=2), IterationStats()))
    idle = metrics((SchedulerStats(), IterationStats()))
    busy.set_lifecycle_state("Ready")
    idle.set_lifecycle_state("Draining")
    both = merged(busy, idle)
    assert (both["llmstack:num_requests_running"], both["vllm:num_requests_waiting"]) == (3, 2)
    assert both["llmstack:lifecycle_state state=Ready"] == 1


def test_series_that_only_another_process_has_are_there():
    other = metrics()
    other.count_http("GET", "/v1/models", 200, 0.1)
    both = merged(metrics(), other)
    assert both["llmstack:http_requests_total method=GET route=/v1/models status=200"] == 1


def test_without_others_nothing_changes():
    alone = metrics((None, finished()))
    assert samples(alone.render()) == samples(alone.render([]))
    ours = {name: value for name, value in samples(alone.render()).items() if "_created" not in name}
    one_more = merged(alone, metrics())
    assert {name: one_more[name] for name in ours} == ours
