"""With several stages, steps under way share no request whose token they still sample, and every stage has work."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeModelRunner
from llmstack_engine_core.build import choose_stage_tokens
from llmstack_kv_cache import KVCacheManager
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams, SchedulerOutput


def config(num_stages: int, **changes: int) -> SchedulerConfig:
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "max_model_len": 64, **changes}
    return SchedulerConfig(pipeline_parallel_size=num_stages, **limits)


def request(name: str, num_prompt_tokens: int, max_tokens: int) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return EngineCoreRequest(name, list(range(1, num_prompt_tokens + 1)), params)


def run(
    num_stages: int, num_blocks: int, requests: list[EngineCoreRequest], **changes: int
) -> tuple[dict[str, list[int]], list[int]]:
    """Tokens of each request, and the number of rows of each step while all run."""
    scheduler = Scheduler(config(num_stages, **changes), KVCacheManager(num_blocks, 4))
    runner = FakeModelRunner(num_blocks, 4)
    for entry in requests:
        scheduler.add_request(entry)
    tokens: dict[str, list[int]] = {entry.request_id: [] for entry in requests}
    under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    sampling: deque[set[str]] = deque()
    sizes = []
    for _ in range(2000):
        if not (scheduler.has_unfinished_requests() or under_way):
            return tokens, sizes
        scheduled = scheduler.schedule(0.0)
        output = runner.execute_model(scheduled)
        ids = {
            row.request_id
            for row, sampled in zip(scheduled.scheduled_requests, output.sampled_token_ids, strict=True)
            if sampled
        }
        for others in sampling:
            assert not others & {row.request_id for row in scheduled.scheduled_requests}
        under_way.append((scheduled, output))
        sampling.append(ids)
        if scheduler.stats().num_running == len(requests):
            sizes.append(len(scheduled.scheduled_requests))
        while len(under_way) >= num_stages or (under_way and under_way[-1][0].is_empty()):
            sampling.popleft()
            for update in scheduler.update_from_output(*under_way.popleft(), 0.0).outputs:
                tokens[update.request_id] += update.new_token_ids
    raise AssertionError("the requests have no end")


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("num_blocks", [200, 17])
def test_requests_get_the_tokens_of_one_stage_also_where_they_are_preempted(num_stages: int, num_blocks: int) -> None:
    requests = [request(f"r{index}", 3 + 5 * index % 17, 4 + index) for index in range(8)]
    alone, _ = run(1, num_blocks, requests)
    staged, _ = run(num_stages, num_blocks, requests)
    assert staged == alone
    assert run(num_stages, num_blocks, requests, min_stage_tokens=3)[0] == alone
    assert all(len(staged[entry.request_id]) == entry.sampling_params.max_tokens for entry in requests)


@pytest.mark.parametrize("seed", [7, 64, 204])
def test_a_preempted_request_does_not_run_again_while_a_stage_still_computes_its_row(seed: int) -> None:
    draw = random.Random(seed)
    num_stages, num_blocks = draw.choice([2, 3, 4]), draw.randint(14, 40)
    requests = [request(f"r{index}", draw.randint(1, 30), draw.randint(1, 20)) for index in range(draw.randint(2, 12))]
    draw.randint(16, 40)
    alone, _ = run(1, num_blocks, requests)
    assert run(num_stages, num_blocks, requests, min_stage_tokens=draw.randint(1, 8))[0] == alone


def test_decodes_are_shared_among_the_steps_under_way() -> None:
    _, sizes = run(2, 200, [request(f"r{index}", 2, 20) for index in range(8)])
    assert set(sizes[4:-4]) == {4}


def test_the_chunks_of_a_prompt_follow_each_other_without_waiting() -> None:
    scheduler = Scheduler(config(2, max_num_batched_tokens=8), KVCacheManager(50, 4))
    scheduler.add_request(request("long", 24, 2))
    starts = [scheduler.schedule(0.0).scheduled_requests[0].num_computed_tokens for _ in range(3)]
    assert starts == [0, 8, 16]
    assert scheduler.schedule(0.0).is_empty()


def num_tokens_of_steps(limits: SchedulerConfig, requests: list[EngineCoreRequest], num_steps: int) -> list[int]:
    scheduler = Scheduler(limits, KVCacheManager(200, 4))
    for entry in requests:
        scheduler.add_request(entry)
    return [scheduler.schedule(0.0).total_num_scheduled_tokens for _ in range(num_steps)]


def test_prompts_are_cut_so_that_all_stages_have_work_soon() -> None:
    limits = config(2, max_num_batched_tokens=32, min_stage_tokens=4)
    alone = [request("long", 60, 2)]
    assert num_tokens_of_steps(limits, alone, 3) == [4, 5, 5]  # a running request may have a token besides
    assert num_tokens_of_steps(replace(limits, min_stage_tokens=0), alone, 2) == [32, 28]
    assert num_tokens_of_steps(replace(limits, pipeline_parallel_size=1), alone, 2) == [32, 28]
    many = [request(f"r{index}", 60, 2) for index in range(8)]
    assert num_tokens_of_steps(limits, many, 1) == [480 // 16]
    assert num_tokens_of_steps(limits, [request(f"q{index}", 60, 2) for index in range(16)], 1) == [32]


def test_the_steps_of_prompts_stay_as_large_as_the_first_one_until_all_are_computed() -> None:
    limits = config(2, max_num_batched_tokens=96, min_stage_tokens=4)
    scheduler, runner = Scheduler(limits, KVCacheManager(200, 4)), FakeModelRunner(200, 4)
    for index in range(12):
        prompt = [token + 60 * index for token in range(60)]  # without a prefix of another one
        scheduler.add_request(EngineCoreRequest(f"r{index}", prompt, SamplingParams(max_tokens=1)))
    sizes = []
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(0.0)
        sizes.append(scheduled.total_num_scheduled_tokens)
        scheduler.update_from_output(scheduled, runner.execute_model(scheduled), 0.0)
    assert min(sizes[:15]) == sizes[0] == 12 * 60 // 16
    assert sum(sizes) == 12 * 60
    assert limits.stage_tokens(60, 30) == 30  # a prompt that comes then is cut by its own size
    assert limits.stage_tokens(30, 1000) == 1000 // 16


def test_prompts_that_have_to_be_whole_are_not_cut() -> None:
    limits = config(2, max_num_batched_tokens=64, min_stage_tokens=4)
    whole = replace(limits, enable_chunked_prefill=False)
    assert num_tokens_of_steps(whole, [request("long", 60, 2)], 1) == [60]


def test_the_smallest_part_of_a_prompt_depends_on_the_device() -> None:
    chosen = {device: choose_stage_tokens(config(2), device).min_stage_tokens for device in ("cpu", "cuda")}
    assert chosen == {"cpu": 64, "cuda": 512}
    assert choose_stage_tokens(config(1), "cpu") == config(1)
    assert choose_stage_tokens(config(2, min_stage_tokens=7), "cpu").min_stage_tokens == 7


def test_drafts_and_stages_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size 2 and drafts exclude each other"):
        replace(config(2), num_lookahead_slots=3)
