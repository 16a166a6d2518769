"""Metrics: vLLM's names, growth from totals, and aliases."""

from __future__ import annotations

import re

from llmstack_llm.stats import FinishedRequestStats, IterationStats
from llmstack_server.http.metrics import ServerMetrics
from llmstack_server.testing import READY
from llmstack_types import SchedulerStats


def values(metrics: ServerMetrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_every_name_on_a_dashboard_is_there_under_both_prefixes():
    metrics = ServerMetrics("m")
    metrics.log_engine_initialized(READY)
    metrics.record(
        SchedulerStats(1, 2, 3, 40, 16, 64, 5, 60, 7),
        IterationStats(
            0.0, 10, 2, 4, [0.1], [0.02, 0.03], [FinishedRequestStats("stop", 1.0, 10, 4, 2, 16, 1, 0.1, 0.03)]
        ),
    )
    found = values(metrics)
    labels = '{engine="0",model_name="m"}'
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.75,
        "prompt_tokens_total": 10,
        "generation_tokens_total": 4,
        "num_preemptions_total": 5,
        "prefix_cache_queries_total": 60,
        "prefix_cache_hits_total": 7,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 2,
        "e2e_request_latency_seconds_sum": 1.0,
        "request_prompt_tokens_sum": 10,
        "request_generation_tokens_sum": 4,
        "iteration_tokens_total_sum": 40,
        "prompt_tokens_cached_total": 2,
    }
    for prefix in ("llmstack:", "vllm:"):
        for name, value in expected.items():
            assert found[f"{prefix}{name}{labels}"] == value, name
        assert found[f'{prefix}request_success_total{{engine="0",finished_reason="stop",model_name="m"}}'] == 1


def test_totals_of_the_engine_become_growth():
    metrics = ServerMetrics("m")
    for total in (3, 3, 8):
        metrics.record(SchedulerStats(num_preemptions=total), IterationStats())
    assert values(metrics)['llmstack:num_preemptions_total{engine="0",model_name="m"}'] == 8


def test_aliases_can_be_switched_off():
    assert b"vllm:" not in ServerMetrics("m", has_aliases=False).render()


def test_two_servers_share_nothing():
    first, second = ServerMetrics("a"), ServerMetrics("b")
    first.record(None, IterationStats(num_generation_tokens=5))
    assert values(second)['llmstack:generation_tokens_total{engine="0",model_name="b"}'] == 0


def test_every_family_has_help_and_a_type():
    text = ServerMetrics("m").render().decode()
    families = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert families == set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))


def test_one_lifecycle_state_at_a_time():
    metrics = ServerMetrics("m")
    metrics.set_lifecycle_state("Loading Model")
    metrics.set_lifecycle_state("Ready")
    states = {name: value for name, value in values(metrics).items() if name.startswith("llmstack:lifecycle_state")}
    assert states == {'llmstack:lifecycle_state{state="Ready"}': 1.0}


def test_drafts_are_counted_place_by_place_and_their_acceptance_shown():
    metrics = ServerMetrics("m")
    for num_steps in (1, 2):
        stats = SchedulerStats(
            num_drafts=2 * num_steps,
            num_draft_tokens=10 * num_steps,
            num_accepted_draft_tokens=4 * num_steps,
            num_accepted_draft_tokens_per_place=(3 * num_steps, num_steps, 0),
        )
        metrics.record(stats, IterationStats())
    found = values(metrics)
    for prefix in ("llmstack:", "vllm:"):
        labels = 'engine="0",model_name="m"'
        assert found[f"{prefix}spec_decode_num_drafts_total{{{labels}}}"] == 4
        assert found[f"{prefix}spec_decode_num_draft_tokens_total{{{labels}}}"] == 20
        assert found[f"{prefix}spec_decode_num_accepted_tokens_total{{{labels}}}"] == 8
        assert found[f"{prefix}spec_decode_draft_acceptance_rate{{{labels}}}"] == 0.4
        places = [
            found[f'{prefix}spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}}']
            for place in range(3)
        ]
        assert places == [6, 2, 0]
