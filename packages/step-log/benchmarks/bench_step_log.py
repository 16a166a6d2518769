"""The processor time that the step log adds to the thread of the steps, and the bytes of a token in it.

As a program it prints medians of nine runs in turns, of the mean processor time
of that thread per step. The steps wait for a model of 1 ms, as a server's do: the
log is written meanwhile. With `--model-ms 0` nothing waits, and what is to be
written piles up.
"""

from __future__ import annotations

import argparse
import gc
import time
from statistics import mean, median

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_core_scheduler import SchedulerConfig
from llmstack_step_log import DeferredLog, LoggedScheduler, LogHeader, RingSink, StepLog
from llmstack_step_log.control_plane import CacheConfig, build_scheduler
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams

MAX_TOKENS = 100_000
MAX_YOUNG_OBJECTS = 20_000  # as in the process of an engine core


def running(num_requests: int, is_recorded: bool) -> tuple[Scheduler, RingSink]:
    limits = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=64 * num_requests, max_model_len=200_000)
    cache, sink = CacheConfig(num_requests * 8192), RingSink(8 << 20)
    scheduler: Scheduler = build_scheduler(limits, cache)
    if is_recorded:
        scheduler = LoggedScheduler(scheduler, DeferredLog(StepLog(LogHeader.of(limits, cache, {}), sink)))
    for index in range(num_requests):
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=0)
        prompt = [index, *range(63)]
        scheduler.add_request(EngineCoreRequest(f"cmpl-0123456789abcdef0123456789abcdef-{index}", prompt, params))
    return scheduler, sink


class Steps:
    """Steps of decodes, one after the other."""

    def __init__(self, num_requests: int, is_recorded: bool, model_s: float = 0.0) -> None:
        self.scheduler, self.sink = running(num_requests, is_recorded)
        self._model_s = model_s
        self._now_s = 0.0

    def step(self) -> float:
        """Schedules and updates one; the processor time of this thread in seconds."""
        before_s = time.thread_time()
        scheduled = self.scheduler.schedule(self._now_s)
        taken_s = time.thread_time() - before_s
        request_ids = [row.request_id for row in scheduled.scheduled_requests]
        output = ModelRunnerOutput(request_ids, [[40_000 + index] for index in range(len(request_ids))])
        if self._model_s:
            time.sleep(self._model_s)
        before_s = time.thread_time()
        self.scheduler.update_from_output(scheduled, output, self._now_s + 0.01)
        self._now_s += 0.011
        return taken_s + time.thread_time() - before_s


@pytest.mark.parametrize("is_recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("num_requests", [1, 64, 256, 1024])
def test_decode_step(benchmark: BenchmarkFixture, num_requests: int, is_recorded: bool) -> None:
    steps = Steps(num_requests, is_recorded)
    steps.step()  # the prefill
    benchmark.pedantic(steps.step, rounds=200, iterations=1, warmup_rounds=5)
    if is_recorded:
        num_tokens = 200 * num_requests
        benchmark.extra_info["bytes_per_token"] = round(steps.sink.num_bytes / num_tokens, 2)


def main() -> None:
    """Prints a line for each number of rows. Garbage is collected as in the process of an engine core."""
    parser = argparse.ArgumentParser(description="Processor time that the step log adds to the thread of the steps.")
    parser.add_argument("--model-ms", type=float, default=1.0, help="time of the model in each step")
    model_s = parser.parse_args().model_ms / 1000
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_YOUNG_OBJECTS)
    for num_requests in (1, 64, 256):
        taken_us: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(18):
            steps = Steps(num_requests, bool(turn % 2), model_s)
            steps.step()  # the prefill
            gc.collect()  # the pool of blocks is as old as the server
            taken_us[bool(turn % 2)].append(1e6 * mean(steps.step() for _ in range(300)))
        plain, recorded = median(taken_us[False]), median(taken_us[True])
        print(f"{num_requests} rows: {plain:.1f} us without, {recorded:.1f} us with a log: {recorded / plain:.2f}")


if __name__ == "__main__":
    main()
