"""A pooling request computes its prompt, returns one vector and ends; it runs beside completions."""

from __future__ import annotations

import pytest

from llmstack_core_scheduler import RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.preemption import AlwaysSwap
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    PoolingParams,
    PoolingType,
    SamplingParams,
    SchedulerOutput,
)

BLOCK_SIZE = 4
VECTOR = b"\x00\x00\x80\x3f"


def make_scheduler() -> Scheduler:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64)
    return Scheduler(config, FakeKVCacheManager(100, BLOCK_SIZE))


def pooling(request_id: str, num_tokens: int, kind: PoolingType = PoolingType.LAST) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=0, seed=0)
    pooling_params = PoolingParams(kind, True)
    return EngineCoreRequest(request_id, list(range(num_tokens)), params, pooling_params=pooling_params)


def completion(request_id: str, num_tokens: int, max_tokens: int = 100) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, list(range(num_tokens)), SamplingParams(max_tokens=max_tokens, seed=0))


def update(scheduler: Scheduler, scheduled: SchedulerOutput) -> dict[str, EngineCoreOutput]:
    """Plays the runner: rows that reach the end of their tokens sample 7, or pool if their id begins with p."""
    rows = scheduled.scheduled_requests
    sampled = [[] if row.request_id.startswith("p") else [7] for row in rows]
    pooled = {row.request_id: VECTOR for row in rows if row.request_id.startswith("p")}
    output = ModelRunnerOutput([row.request_id for row in rows], sampled, pooled=pooled)
    return {one.request_id: one for one in scheduler.update_from_output(scheduled, output, 0.0).outputs}


def run(scheduler: Scheduler) -> tuple[list[dict[str, tuple[int, int]]], dict[str, EngineCoreOutput]]:
    """Per step each row's first token and count; and the last message of each request."""
    steps, last = [], {}
    while scheduler.running or scheduler.waiting:
        scheduled = scheduler.schedule(0.0)
        rows = scheduled.scheduled_requests
        steps.append({row.request_id: (row.num_computed_tokens, row.num_scheduled_tokens) for row in rows})
        last |= update(scheduler, scheduled)
    return steps, last


def test_it_ends_with_the_step_that_computes_its_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(pooling("p", 10))
    steps, last = run(scheduler)
    assert steps == [{"p": (0, 10)}]
    assert last["p"] == EngineCoreOutput("p", [], finish_reason=FinishReason.STOP, num_cached_tokens=0, pooled=VECTOR)
    assert scheduler.stats().num_free_blocks == 100
    assert scheduler.schedule(0.0).removed_request_ids == ["p"]


def test_its_prompt_may_fill_the_whole_context() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(pooling("p", 64))
    steps, last = run(scheduler)
    assert [row["p"] for row in steps] == [(0, 16), (16, 16), (32, 16), (48, 16)]
    assert last["p"].pooled == VECTOR


def test_the_runner_receives_the_pooling_parameters() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(pooling("p", 5, PoolingType.MEAN))
    assert scheduler.schedule(0.0).new_requests[0].pooling_params == PoolingParams(PoolingType.MEAN, True)


def test_completions_go_on_beside_it() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(completion("c", 3, max_tokens=3))
    scheduler.add_request(pooling("p", 20))
    steps, last = run(scheduler)
    assert steps == [{"c": (0, 3), "p": (0, 13)}, {"c": (3, 1), "p": (13, 7)}, {"c": (4, 1)}]
    assert last["c"].finish_reason is FinishReason.LENGTH
    assert last["p"].pooled == VECTOR


@pytest.mark.parametrize(
    ("kind", "first"), [(PoolingType.LAST, 8), (PoolingType.MEAN, 0), (PoolingType.CLS, 0)], ids=str
)
def test_a_prefix_hit_serves_the_last_tokens_vector_only(kind: PoolingType, first: int) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(completion("c", 10, max_tokens=1))
    run(scheduler)
    scheduler.add_request(pooling("p", 10, kind))
    steps, last = run(scheduler)
    assert steps == [{"p": (first, 10 - first)}]
    assert last["p"].num_cached_tokens == first


@pytest.mark.parametrize("kind", PoolingType)
def test_what_the_runner_has_summed_up_is_computed_again_rather_than_swapped(kind: PoolingType) -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=2, max_model_len=64)
    manager = FakeKVCacheManager(8, BLOCK_SIZE, num_host_blocks=50)
    scheduler = Scheduler(config, manager, preemption=AlwaysSwap())
    scheduler.add_request(completion("c", 4, max_tokens=17))
    scheduler.add_request(pooling("p", 24, kind))
    steps, last = run(scheduler)
    first_tokens = [rows["p"][0] for rows in steps if "p" in rows]
    assert scheduler.stats().num_preemptions > 0
    assert (first_tokens.count(0) > 1) == (kind is not PoolingType.LAST)
    assert last["p"].pooled == VECTOR


def test_under_asynchronous_scheduling_nothing_follows_its_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(pooling("p", 10))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert second.is_empty()
    assert update(scheduler, first)["p"].finish_reason is FinishReason.STOP
    assert update(scheduler, second) == {}


def test_a_completion_without_a_token_is_an_error_still() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(completion("pretends", 3, max_tokens=5))
    assert update(scheduler, scheduler.schedule(0.0))["pretends"].finish_reason is FinishReason.ERROR


def test_a_row_that_fails_ends_with_its_error() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(pooling("p", 3))
    scheduled = scheduler.schedule(0.0)
    output = ModelRunnerOutput(["p"], [[]], errors={"p": "no vector"})
    (message,) = scheduler.update_from_output(scheduled, output, 0.0).outputs
    assert (message.finish_reason, message.error, message.pooled) == (FinishReason.ERROR, "no vector", None)


def test_an_aborted_one_returns_nothing() -> None:
    statuses: list[RequestStatus] = []
    manager = FakeKVCacheManager(100, BLOCK_SIZE)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64)
    scheduler = Scheduler(config, manager, on_status=lambda _, status: statuses.append(status))
    scheduler.add_request(pooling("p", 20))
    scheduled = scheduler.schedule(0.0)
    scheduler.abort_requests(["p"])
    assert update(scheduler, scheduled) == {}
    assert statuses[-1] is RequestStatus.FINISHED_ABORTED
    assert scheduler.stats().num_free_blocks == 100
