"""What a prefix hit of 128k or 512k tokens costs the longest step; `extra_info` holds work and times.

Work is counted in blocks of a lookup, and does not depend on the machine: `most_blocks_in_a_step`. Times are processor
time of the thread in milliseconds: of adding the request, of the longest `schedule` that looks up, of the one that
admits, which copies tokens and block ids once, and of the update that frees the blocks.
"""

from time import thread_time

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams

KVCacheManager = pytest.importorskip("llmstack_kv_cache").KVCacheManager


class CountingManager(KVCacheManager):
    """Counts the blocks that lookups find in pieces, and those found when a request is admitted."""

    num_looked_up = 0

    def look_ahead(self, *arguments):
        found = super().look_ahead(*arguments)
        self.num_looked_up += found
        return found


def update(scheduler, scheduled):
    rows = scheduled.scheduled_requests
    output = ModelRunnerOutput([row.request_id for row in rows], [[7] for _ in rows])
    began_s = thread_time()
    scheduler.update_from_output(scheduled, output, 0.0)
    return thread_time() - began_s


def warm_scheduler(num_tokens):
    """A scheduler whose cache has a prompt of so many tokens."""
    manager = CountingManager(num_tokens // 16 * 2)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8192, max_model_len=num_tokens + 64)
    scheduler = Scheduler(config, manager)
    prompt = list(range(1000, 1000 + num_tokens))
    scheduler.add_request(EngineCoreRequest("warm", prompt, SamplingParams(max_tokens=1)))
    while scheduler.has_unfinished_requests():
        update(scheduler, scheduler.schedule(0.0))
    return scheduler, prompt


@pytest.mark.parametrize("num_tokens", [131_072, 524_288])
def test_prefix_hit(benchmark, num_tokens):
    scheduler, prompt = warm_scheduler(num_tokens)
    manager, steps = scheduler.kv_cache_manager, []

    def hit():
        request = EngineCoreRequest(f"hit{len(steps)}", [*prompt, 1], SamplingParams(max_tokens=2))
        times, began_s = {"blocks": 0, "looks_up": 0.0, "frees": 0.0}, thread_time()
        scheduler.add_request(request)
        times["adds"] = thread_time() - began_s
        while scheduler.has_unfinished_requests():
            manager.num_looked_up, began_s = 0, thread_time()
            scheduled = scheduler.schedule(0.0)
            took_s = thread_time() - began_s
            name = "admits" if scheduled.new_requests else "looks_up"
            times[name] = max(times.get(name, 0.0), took_s)
            times["blocks"] = max(times["blocks"], manager.num_looked_up)
            times["frees"] = max(times["frees"], update(scheduler, scheduled))
        steps.append(times)

    benchmark.pedantic(hit, rounds=7, warmup_rounds=1)
    benchmark.extra_info["most_blocks_in_a_step"] = max(times["blocks"] for times in steps)
    for name in ("adds", "looks_up", "admits", "frees"):
        taken = sorted(times[name] for times in steps)
        benchmark.extra_info[f"{name}_ms"] = round(taken[len(taken) // 2] * 1e3, 2)
    print(f"\n{num_tokens} tokens: {benchmark.extra_info}")
