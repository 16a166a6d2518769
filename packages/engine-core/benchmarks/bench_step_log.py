"""The time that the step log adds to a step of decodes, and the bytes of a token in it."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_engine_core import SchedulerConfig
from llmstack_engine_core.control_plane import CacheConfig, build_scheduler
from llmstack_engine_core.protocols import Scheduler
from llmstack_engine_core.step_log import LoggedScheduler, LogHeader, RingSink, StepLog
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams

MAX_TOKENS = 100_000


def running(num_requests: int, is_recorded: bool) -> tuple[Scheduler, RingSink]:
    limits = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=64 * num_requests, max_model_len=200_000)
    cache, sink = CacheConfig(num_requests * 8192), RingSink(8 << 20)
    scheduler: Scheduler = build_scheduler(limits, cache)
    if is_recorded:
        scheduler = LoggedScheduler(scheduler, StepLog(LogHeader.of(limits, cache, {}), sink))
    for index in range(num_requests):
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=0)
        prompt = [index, *range(63)]
        scheduler.add_request(EngineCoreRequest(f"cmpl-0123456789abcdef0123456789abcdef-{index}", prompt, params))
    return scheduler, sink


@pytest.mark.parametrize("is_recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("num_requests", [1, 64, 256, 1024])
def test_decode_step(benchmark: BenchmarkFixture, num_requests: int, is_recorded: bool) -> None:
    scheduler, sink = running(num_requests, is_recorded)
    now_s = 0.0

    def step() -> None:
        nonlocal now_s
        scheduled = scheduler.schedule(now_s)
        request_ids = [row.request_id for row in scheduled.scheduled_requests]
        sampled = [[40_000 + index] for index in range(len(request_ids))]
        scheduler.update_from_output(scheduled, ModelRunnerOutput(request_ids, sampled), now_s + 0.01)
        now_s += 0.011

    step()  # the prefill
    benchmark.pedantic(step, rounds=200, iterations=1, warmup_rounds=5)
    if is_recorded:
        num_tokens = 200 * num_requests
        benchmark.extra_info["bytes_per_token"] = round(sink.num_bytes / num_tokens, 2)
