"""Metrics: vLLM's names, growth from totals, and aliases."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmstack_llm.outputs.stats import FinishedRequestStats, IterationStats
from llmstack_llm.speech.served import SpeechCounts
from llmstack_server.observability.metrics import ServerMetrics
from llmstack_server.state.idle_sleep import IdleSleep
from llmstack_server.testing import READY
from llmstack_types import BlockEviction, EncoderStats, SchedulerStats, StepPhases

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "observability.md"


MEDIA: Any = SimpleNamespace(
    num_queries=5, num_hits=2, num_bytes=700, decode_s=0.5, fetch_results={"ok": 4, "media_fetch_failed": 1},
    failures={"invalid_image": 3},
)  # fmt: skip


SPEECH: Any = SimpleNamespace(
    counts=SpeechCounts(), files=SimpleNamespace(decoded_s=1.0, processor_s=0.1, failures={"invalid_audio": 1})
)


def values(metrics: ServerMetrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_the_page_on_observability_names_every_metric_and_no_other():
    page = DOCUMENT.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(("| gauges", "| counters", "| histograms"))]
    named = {re.sub(r"\{.*", "", name) for name in re.findall(r"`([^`]+)`", "".join(rows))}
    named = {name.replace("…", "spec_decode_num") for name in named}
    metrics = ServerMetrics("m")
    metrics.follow_media(lambda: MEDIA)
    metrics.follow_speech(lambda: SPEECH)
    metrics.follow_idle(IdleSleep(lambda: None, 1.0))
    rendered = metrics.render().decode()
    exposed = set(re.findall(r"^# TYPE llmstack:(\S+)", rendered, re.MULTILINE))
    of_options = {name for name in exposed if name.startswith(("kv_block_", "shadow_"))}
    assert all(f"`{name}" in page for name in of_options)
    assert exposed - of_options == named


def test_media_are_counted_for_models_that_take_them_alone():
    metrics = ServerMetrics("m")
    metrics.follow_media(lambda: None)
    assert "media_" not in metrics.render().decode()
    metrics = ServerMetrics("m")
    metrics.follow_media(lambda: MEDIA)
    found = values(metrics)
    name = 'model_name="m"'
    expected = {
        f"lookups_total{{{name}}}": 5, f"lookup_hits_total{{{name}}}": 2, f"bytes_total{{{name}}}": 700,
        f"decode_cpu_seconds_total{{{name}}}": 0.5, f'fetches_total{{{name},result="ok"}}': 4,
        f'fetches_total{{{name},result="media_fetch_failed"}}': 1,
        f'failures_total{{code="invalid_image",{name}}}': 3,
    }  # fmt: skip
    for key, value in expected.items():
        assert found[f"llmstack:media_{key}"] == value, key


def test_every_name_on_a_dashboard_is_there_under_both_prefixes():
    metrics = ServerMetrics("m")
    metrics.log_engine_initialized(READY)
    metrics.record(
        SchedulerStats(1, 2, 3, 40, 16, 64, 5, 60, 7),
        IterationStats(
            0.0,
            10,
            3,
            4,
            [0.1],
            [0.02, 0.03],
            [FinishedRequestStats("stop", 1.0, 10, 4, 2, 16, 0.1, 0.03)],
            num_external_queries=9,
            num_external_tokens=1,
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
        "iteration_tokens_total_sum": 41,  # 40 are computed, and one request had its first token
        "prompt_tokens_cached_total": 3,
        "external_prefix_cache_hits_total": 1,
        "external_prefix_cache_queries_total": 9,
        "mm_cache_hits_total": 0,
        "mm_cache_queries_total": 0,
        "request_prefill_kv_computed_tokens_sum": 8,
    }
    split = {
        ("prompt_tokens_by_source_total", "source", "local_compute"): 7,
        ("prompt_tokens_by_source_total", "source", "local_cache_hit"): 2,
        ("prompt_tokens_by_source_total", "source", "external_kv_transfer"): 1,
        ("prompt_tokens_cached_by_source_total", "source", "device"): 3,
        ("prompt_tokens_cached_by_source_total", "source", "host"): 0,
        ("num_requests_waiting_by_reason", "reason", "capacity"): 3,
        ("num_requests_waiting_by_reason", "reason", "deferred"): 0,
    }
    for prefix in ("llmstack:", "vllm:"):
        for name, value in expected.items():
            assert found[f"{prefix}{name}{labels}"] == value, name
        for (name, label, part), value in split.items():
            names = {"engine": "0", "model_name": "m", label: part}
            shown = ",".join(f'{key}="{names[key]}"' for key in sorted(names))
            assert found[f"{prefix}{name}{{{shown}}}"] == value, name
        assert found[f'{prefix}request_success_total{{engine="0",finished_reason="stop",model_name="m"}}'] == 1


def test_every_name_of_the_surface_is_exported_from_the_start():
    names = """num_requests_running num_requests_waiting kv_cache_usage_perc engine_sleep_state
    prompt_tokens_total generation_tokens_total prompt_tokens_cached_total request_success_total num_preemptions_total
    prefix_cache_queries_total prefix_cache_hits_total corrupted_requests_total admission_rejections_total
    spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total"""
    histograms = """time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
    request_decode_time_seconds request_prompt_tokens request_generation_tokens request_params_n
    request_params_max_tokens request_max_num_generation_tokens iteration_tokens_total request_num_preemptions"""
    text = ServerMetrics("m").render().decode()
    found = set(re.findall(r"^([a-z0-9_:]+)[ {]", text, re.MULTILINE))
    expected = {*names.split(), *(f"{name}_bucket" for name in histograms.split())}
    for prefix in ("llmstack:", "vllm:"):
        assert {prefix + name for name in expected} <= found
        assert f"# TYPE {prefix}lora_requests_info gauge" in text  # declared, and empty until there are adapters


def test_buckets_are_those_that_queries_of_vllms_dashboards_name():
    metrics = ServerMetrics("m")
    found = values(metrics)
    for name, ends in {
        "time_to_first_token_seconds": ("0.001", "0.08", "2560.0"),
        "inter_token_latency_seconds": ("0.01", "0.025", "80.0"),
        "e2e_request_latency_seconds": ("0.3", "1.0", "7680.0"),
        "request_queue_time_seconds": ("0.3", "1.0", "7680.0"),
        "iteration_tokens_total": ("1.0", "8.0", "16384.0"),
        "request_params_n": ("1.0", "20.0"),
    }.items():
        for end in (*ends, "+Inf"):
            assert f'vllm:{name}_bucket{{engine="0",le="{end}",model_name="m"}}' in found


def test_the_time_of_a_request_is_split_into_its_stages():
    metrics = ServerMetrics("m")
    finished = FinishedRequestStats(
        "length", 1.0, 3, 4, queue_time_s=0.1, prefill_time_s=0.2, decode_time_s=0.7, inference_time_s=0.9,
        num_preemptions=2,
    )  # fmt: skip
    metrics.record(None, IterationStats(finished_requests=[finished], whole_requests=[(2, 4)]))
    found = values(metrics)
    for name, value in {
        "request_queue_time_seconds": 0.1,
        "request_prefill_time_seconds": 0.2,
        "request_decode_time_seconds": 0.7,
        "request_inference_time_seconds": 0.9,
        "request_num_preemptions": 2,
        "request_params_n": 2,
        "request_max_num_generation_tokens": 4,
    }.items():
        assert found[f'vllm:{name}_sum{{engine="0",model_name="m"}}'] == value


def test_ends_without_an_output_are_counted_by_reason():
    metrics = ServerMetrics("m")
    metrics.record(None, IterationStats(num_aborted=2, num_failed=3, num_corrupted=1))
    found = values(metrics)
    reasons = {
        reason: found[f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="m"}}']
        for reason in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 0, "length": 0, "abort": 2, "error": 3}
    assert found['vllm:corrupted_requests_total{engine="0",model_name="m"}'] == 1


def test_the_parts_of_a_step_add_up():
    metrics = ServerMetrics("m")
    for _ in range(2):
        metrics.record(None, IterationStats(phases=StepPhases(0.25, 0.5, 0.125)))
    found = values(metrics)
    phases = {
        phase: found[f'llmstack:step_phase_seconds_total{{engine="0",model_name="m",phase="{phase}"}}']
        for phase in ("schedule", "execute", "update")
    }
    assert phases == {"schedule": 0.5, "execute": 1.0, "update": 0.25}


def test_blocks_have_series_once_they_are_measured():
    metrics = ServerMetrics("m")
    assert not any("kv_block" in name for name in values(metrics))
    metrics.record(None, IterationStats(block_evictions=[BlockEviction(3.0, 1.0, (0.5, 0.25))]))
    found = values(metrics)
    sums = [
        found[f'vllm:kv_block_{name}_seconds_sum{{engine="0",model_name="m"}}']
        for name in ("lifetime", "idle_before_evict", "reuse_gap")
    ]
    assert sums == [3.0, 1.0, 0.75]


def test_each_engine_has_series_of_its_own():
    metrics = ServerMetrics("m")
    metrics.record(None, IterationStats(num_generation_tokens=5, engine_index=1))
    found = values(metrics)
    tokens = [found[f'vllm:generation_tokens_total{{engine="{engine}",model_name="m"}}'] for engine in (0, 1)]
    assert tokens == [0, 5]


def test_the_cache_is_described():
    metrics = ServerMetrics("m", cache_facts={"enable_prefix_caching": "True", "num_cpu_blocks": "0"})
    metrics.log_engine_initialized(READY)
    line = next(line for line in metrics.render().decode().splitlines() if line.startswith("vllm:cache_config_info"))
    for label in ('block_size="16"', 'num_gpu_blocks="64"', 'cache_dtype="float32"', 'enable_prefix_caching="True"'):
        assert label in line
    metrics.log_engine_initialized(replace(READY, num_blocks=128))  # after a reload
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("vllm:cache_config_info")]
    assert ['num_gpu_blocks="128"' in line for line in lines] == [True]


def test_http_has_the_instrumentators_names_as_aliases():
    metrics = ServerMetrics("m")
    for status in (200, 204, 404):
        metrics.count_http("POST", "/v1/completions", status, 0.3)
    found = values(metrics)
    assert found['llmstack:http_requests_total{method="POST",route="/v1/completions",status="204"}'] == 1
    assert found['http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'] == 2
    assert found['http_requests_total{handler="/v1/completions",method="POST",status="4xx"}'] == 1
    assert found['http_request_duration_seconds_count{handler="/v1/completions",method="POST"}'] == 3


def test_refusals_are_counted_by_the_limit_that_was_reached():
    metrics = ServerMetrics("m")
    metrics.count_rejection("max_num_queued_tokens")
    found = values(metrics)
    assert found['vllm:admission_rejections_total{model_name="m",reason="max_num_queued_tokens"}'] == 1
    assert found['vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"}'] == 0


def test_one_sleep_state_at_a_time():
    metrics = ServerMetrics("m")
    metrics.engine(0).set_sleep_level(2)
    found = values(metrics)
    states = [
        found[f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="{state}"}}']
        for state in ("awake", "weights_offloaded", "discard_all")
    ]
    assert states == [0, 0, 1]


@pytest.mark.parametrize("has_aliases", [True, False])
def test_the_times_at_which_counters_were_made_are_left_away(has_aliases: bool):
    assert b"_created" not in ServerMetrics("m", has_aliases=has_aliases).render()


def test_totals_of_the_engine_become_growth():
    metrics = ServerMetrics("m")
    for total in (3, 3, 8):
        metrics.record(SchedulerStats(num_preemptions=total), IterationStats())
    assert values(metrics)['llmstack:num_preemptions_total{engine="0",model_name="m"}'] == 8


def test_the_totals_of_another_engine_core_count_from_its_start():
    metrics = ServerMetrics("m")
    for step, total in ((1, 3), (5, 8), (1, 3), (2, 9)):
        metrics.record(SchedulerStats(step=step, num_preemptions=total), IterationStats())
    assert values(metrics)['llmstack:num_preemptions_total{engine="0",model_name="m"}'] == 8 + 9


def test_figures_of_an_encoder_are_exposed_where_there_is_one():
    metrics = ServerMetrics("m")
    metrics.record(SchedulerStats(step=1, encoder=EncoderStats(40, 10, 5, 2, 3, 90, 1, 1)), IterationStats())
    values(metrics)
    metrics.record(SchedulerStats(step=2, encoder=EncoderStats(40, 20, 6, 3, 3, 90, 1, 1)), IterationStats())
    found = {name.split("{")[0].removeprefix("llmstack:"): value for name, value in values(metrics).items()}
    assert found["encoder_cache_usage_perc"] == 0.5
    assert (found["mm_cache_queries_total"], found["mm_cache_hits_total"]) == (6, 3)
    assert (found["encoder_items_total"], found["encoder_units_total"]) == (3, 90)
    assert (found["encoder_evictions_total"], found["encoder_repeats_total"]) == (1, 1)


def test_what_was_read_is_not_counted_again():
    metrics = ServerMetrics("m")
    for _ in range(2):
        metrics.record(None, IterationStats(num_generation_tokens=2, phases=StepPhases(0.25, 0.5, 0.125)))
        values(metrics)
    found = values(metrics)
    assert found['llmstack:generation_tokens_total{engine="0",model_name="m"}'] == 4
    assert found['llmstack:step_phase_seconds_total{engine="0",model_name="m",phase="execute"}'] == 1.0


def test_without_statistics_no_engine_has_a_family():
    metrics = ServerMetrics("m", has_engine_families=False)
    metrics.record(SchedulerStats(1, 2, 3), IterationStats(0.0, 10))
    names = {line.split("{")[0].split(" ")[0] for line in metrics.render().decode().splitlines() if line[0] != "#"}
    assert names
    assert not {name for name in names if "token" in name or "request_success" in name or "num_requests_r" in name}


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
