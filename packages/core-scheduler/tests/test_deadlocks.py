"""Deadlocks and starvation that other engines have published, each as a case of its own."""

import pytest

from llmstack_core_scheduler import AlwaysSwap, RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner
from llmstack_types import EngineCoreRequest, InvalidRequestError, ModelRunnerOutput, SamplingParams


def make_scheduler(num_blocks, block_size=4, num_host_blocks=0, preemption=None, **config):
    defaults = {"max_num_batched_tokens": 64, "max_model_len": 64}
    manager = FakeKVCacheManager(num_blocks, block_size, num_host_blocks=num_host_blocks)
    return Scheduler(SchedulerConfig(**(defaults | config)), manager, preemption=preemption)


def request_of(request_id, length, max_tokens, **kwargs):
    prompt = [ord(request_id[0]) * 100 + position for position in range(length)]
    return EngineCoreRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), **kwargs)


def step(scheduler):
    scheduled = scheduler.schedule(0.0)
    rows = scheduled.scheduled_requests
    output = ModelRunnerOutput([row.request_id for row in rows], [[7] for _ in rows])
    scheduler.update_from_output(scheduled, output, 0.0)
    return {row.request_id: row.num_scheduled_tokens for row in rows}


def run(scheduler, max_num_steps=500):
    for num_steps in range(max_num_steps):
        if not scheduler.has_unfinished_requests():
            return num_steps
        step(scheduler)
    raise AssertionError("no end")


@pytest.mark.parametrize(("length", "max_tokens"), [(17, 1), (1, 17), (9, 9)])
def test_a_request_that_never_fits_is_refused_when_added_and_does_not_block_the_queue(length, max_tokens):
    scheduler = make_scheduler(4)
    with pytest.raises(InvalidRequestError):
        scheduler.add_request(request_of("huge", length, max_tokens + 1))
    scheduler.add_request(request_of("small", 4, 2))
    assert run(scheduler) < 5


def test_with_no_running_request_and_all_blocks_free_the_largest_possible_request_is_admitted():
    scheduler = make_scheduler(4)
    scheduler.add_request(request_of("warm", 9, 1))
    run(scheduler)
    assert scheduler.stats().num_free_blocks == 4  # two of them still cached
    scheduler.add_request(request_of("full", 16, 1))
    assert step(scheduler) == {"full": 16}


def test_a_watermark_does_not_keep_out_who_needs_the_whole_pool():
    kv_cache = pytest.importorskip("llmstack_kv_cache")
    manager = kv_cache.KVCacheManager(4, 4, watermark=0.5)
    scheduler = Scheduler(SchedulerConfig(max_model_len=64), manager)
    scheduler.add_request(request_of("full", 16, 1))
    assert step(scheduler) == {"full": 16}


def test_the_starvation_guard_ends_the_thrashing_of_several_requests():
    scheduler = make_scheduler(5, block_size=2, max_num_preemptions=2)
    for request_id in "abc":
        scheduler.add_request(request_of(request_id, 2, 8))
    preempted = dict.fromkeys("abc", 0)
    while scheduler.has_unfinished_requests():
        step(scheduler)
        for request in [*scheduler.running, *scheduler.waiting]:
            preempted[request.request_id] = max(preempted[request.request_id], request.num_preemptions)
    assert max(preempted.values()) <= 2


def thrashed(max_num_preemptions):
    """A young request beside old ones that come and go: each one takes its blocks."""
    scheduler = make_scheduler(4, block_size=2, policy="priority", max_num_preemptions=max_num_preemptions)
    young = request_of("young", 3, 4, priority=1)
    scheduler.add_request(young)
    (request,) = scheduler.waiting
    for number in range(60):
        scheduler.add_request(request_of(f"old{number}", 2, 5))
        for _ in range(6):
            step(scheduler)
    run(scheduler)
    return request


@pytest.mark.parametrize("max_num_preemptions", [1, 4])
def test_no_request_is_preempted_more_often_than_the_limit_says(max_num_preemptions):
    request = thrashed(max_num_preemptions)
    assert request.is_finished
    assert 0 < request.num_preemptions <= max_num_preemptions


def test_a_protected_request_is_admitted_only_with_room_for_all_it_may_become():
    scheduler = make_scheduler(6, block_size=2, max_num_preemptions=1)
    scheduler.add_request(request_of("old", 4, 5))
    scheduler.add_request(request_of("young", 4, 5))
    step(scheduler)
    while not scheduler.waiting:
        step(scheduler)
    (young,) = scheduler.waiting
    assert young.is_protected
    while young.status is not RequestStatus.RUNNING:
        rows = step(scheduler)
        assert list(rows) in (["old"], ["young"])
    run(scheduler)
    assert young.num_preemptions == 1


def test_no_priority_inversion_the_urgent_request_takes_the_blocks_of_the_idle_one():
    scheduler = make_scheduler(4, policy="priority")
    scheduler.add_request(request_of("low", 4, 12, priority=9))
    for _ in range(3):
        step(scheduler)
    scheduler.add_request(request_of("urgent", 4, 12, priority=0))
    ends = {}
    for number in range(60):
        for request_id in step(scheduler):
            ends[request_id] = number
    assert ends["urgent"] < ends["low"]
    assert not scheduler.has_unfinished_requests()


def test_a_low_request_that_arrived_first_does_not_hold_the_queue_against_an_urgent_one():
    scheduler = make_scheduler(4, policy="priority", max_num_seqs=1)
    scheduler.add_request(request_of("running", 4, 2, priority=5))
    step(scheduler)
    scheduler.add_request(request_of("low", 4, 1, priority=9))
    scheduler.add_request(request_of("urgent", 4, 1, priority=0))
    assert [list(step(scheduler)) for _ in range(3)] == [["running"], ["urgent"], ["low"]]


def test_a_budget_spent_by_one_long_prompt_starves_no_request():
    """What an encoder's budget does elsewhere: here every running row has a token of every step."""
    scheduler = make_scheduler(64, max_num_batched_tokens=8, max_model_len=200, policy="priority")
    for request_id in "abc":
        scheduler.add_request(request_of(request_id, 1, 40, priority=1))
    step(scheduler)
    scheduler.add_request(request_of("long", 100, 2, priority=0))
    for _ in range(10):
        rows = step(scheduler)
        assert rows == {"long": 5, "a": 1, "b": 1, "c": 1}


def test_two_long_prompts_do_not_keep_short_ones_waiting():
    limits = {"max_num_batched_tokens": 12, "long_prefill_token_threshold": 5, "max_model_len": 200}
    scheduler = make_scheduler(100, max_num_partial_prefills=1, **limits)
    for request_id, length in (("long", 60), ("second", 60), ("tiny", 4), ("small", 3)):
        scheduler.add_request(request_of(request_id, length, 2))
    assert step(scheduler) == {"long": 5, "tiny": 4, "small": 3}
    for _ in range(10):
        assert "second" not in step(scheduler)
    assert step(scheduler)["second"] == 5


def test_as_many_long_prompts_as_the_limit_are_computed_at_once():
    limits = {"max_num_batched_tokens": 20, "long_prefill_token_threshold": 5, "max_model_len": 200}
    scheduler = make_scheduler(100, max_num_partial_prefills=2, **limits)
    for request_id in ("first", "second", "third"):
        scheduler.add_request(request_of(request_id, 60, 2))
    for _ in range(11):
        assert step(scheduler) == {"first": 5, "second": 5}
    assert step(scheduler) == {"first": 5, "second": 5, "third": 5}


def test_short_prompts_do_not_keep_a_long_one_out_for_ever():
    limits = {"max_num_batched_tokens": 12, "long_prefill_token_threshold": 5, "max_model_len": 60}
    scheduler = make_scheduler(16, max_num_partial_prefills=1, **limits)
    scheduler.add_request(request_of("long", 30, 2))
    step(scheduler)
    scheduler.add_request(request_of("second", 30, 2))
    for number in range(40):
        scheduler.add_request(request_of(f"x{number}", 4, 6))
        if "second" in step(scheduler):
            break
    assert number < 20


def test_a_full_host_pool_falls_back_to_recompute():
    scheduler = make_scheduler(4, num_host_blocks=2, preemption=AlwaysSwap(), max_model_len=16)
    runner = FakeModelRunner(4, 4, num_host_blocks=2)
    for request_id in "abc":
        scheduler.add_request(request_of(request_id, 4, 12))
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(0.0)
        scheduler.update_from_output(scheduled, runner.execute_model(scheduled), 0.0)
    stats = scheduler.stats()
    assert 0 < stats.num_swap_preemptions < stats.num_preemptions
    assert stats.num_free_host_blocks == 2


def test_a_swapped_request_that_is_aborted_gives_its_host_blocks_back():
    scheduler = make_scheduler(3, num_host_blocks=8, preemption=AlwaysSwap(), max_model_len=12)
    for request_id in "ab":
        scheduler.add_request(request_of(request_id, 4, 8))
    while not scheduler.stats().num_swapped:
        step(scheduler)
    scheduler.abort_requests("ab")
    stats = scheduler.stats()
    assert (stats.num_swapped, stats.num_free_host_blocks, stats.num_free_blocks) == (0, 8, 3)
