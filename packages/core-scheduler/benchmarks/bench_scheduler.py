"""What a step costs the control plane while every request decodes; `extra_info` holds the ratio to vLLM 0.32.

The peer's figures (schedule + update, prefix caching on) are of the same kind of machine (2 vCPU), in microseconds.
Times are processor time of the thread, so they hold on a machine with other work. To compare two checkouts, run this
file in both in turns, each with `--benchmark-only` and its own sources.
"""

import time

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams

PEER_US = {1: 23, 64: 488, 256: 1956, 1024: 8715}
NUM_STEPS = 300


def decoding_scheduler(num_running):
    """Requests that have their first token and are at different places in their blocks."""
    num_blocks = num_running * 64
    try:
        from llmstack_kv_cache import KVCacheManager

        manager = KVCacheManager(num_blocks)
    except ImportError:
        manager = FakeKVCacheManager(num_blocks)
    config = SchedulerConfig(num_running, max_num_batched_tokens=num_running * 128, max_model_len=1024)
    scheduler = Scheduler(config, manager)
    for number in range(num_running):
        prompt = list(range(number, number + 100 + number % 16))
        scheduler.add_request(EngineCoreRequest(str(number), prompt, SamplingParams(max_tokens=900)))
    scheduled = scheduler.schedule(0.0)
    scheduler.update_from_output(scheduled, answer(scheduled), 0.0)
    return scheduler


def answer(scheduled):
    rows = scheduled.scheduled_requests
    return ModelRunnerOutput([row.request_id for row in rows], [[7] for _ in rows])


@pytest.mark.benchmark(timer=time.thread_time)
@pytest.mark.parametrize("num_running", [1, 64, 256, 1024])
def test_decode_step(benchmark, num_running):
    scheduler = decoding_scheduler(num_running)
    # The runner's answer is made outside of what is measured; a decode-only step always has the same rows.
    output = answer(scheduled := scheduler.schedule(0.0))
    scheduler.update_from_output(scheduled, output, 0.0)

    def step(output):
        scheduler.update_from_output(scheduler.schedule(0.0), output, 0.0)

    def setup():
        return (ModelRunnerOutput(output.request_ids, [[7] for _ in output.request_ids]),), {}

    benchmark.pedantic(step, setup=setup, rounds=NUM_STEPS, warmup_rounds=20)
    benchmark.extra_info["peer_us"] = PEER_US[num_running]
    if benchmark.stats is not None:
        median_us = benchmark.stats["median"] * 1e6
        benchmark.extra_info["us_per_running_request"] = round(median_us / num_running, 3)
        benchmark.extra_info["times_as_fast_as_peer"] = round(PEER_US[num_running] / median_us, 2)


def test_a_request_of_1024_tokens_queued_and_aborted(benchmark):
    scheduler = Scheduler(SchedulerConfig(), FakeKVCacheManager(100))
    request = EngineCoreRequest("a", list(range(1024)), SamplingParams(max_tokens=1))

    def add_and_abort():
        scheduler.add_request(request)
        scheduler.abort_requests(["a"])

    benchmark(add_and_abort)
