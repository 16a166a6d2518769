"""Requests that may have read what a failed row was to write are computed again, wherever they are meanwhile."""

import pytest

from llmstack_core_scheduler import AlwaysSwap, Scheduler, SchedulerConfig
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_core_scheduler.testing import FakeEncoder, FakeKVCacheManager, FakeModelRunner, next_token, seen_ids
from llmstack_types import EngineCoreRequest, MediaItem, MediaSpec, ModelRunnerOutput, RequestStatus, SamplingParams

SPEC = MediaSpec(8, {"image": 4}, max_num_tokens={"image": 8})
PICTURE = MediaItem(bytes(32), "image", 0, 4, num_units=40)


def request(name, *media):
    return EngineCoreRequest(name, [7] * 4 + [1, 2, 3], SamplingParams(max_tokens=3), media=media)


def make(num_host_blocks=0):
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, media=SPEC)
    manager = FakeKVCacheManager(16, 4, num_host_blocks=num_host_blocks)
    return Scheduler(config, manager, preemption=AlwaysSwap()), manager


def test_a_request_that_is_swapped_out_gives_its_host_blocks_back():
    scheduler, manager = make(num_host_blocks=8)
    scheduler.add_request(request("a"))
    scheduler.schedule(0.0)
    (running,) = scheduler.running
    scheduler._preempt(running, StepPlan(SchedulerConfig(), 1))
    assert running.status is RequestStatus.SWAPPED
    assert manager.num_free_host_blocks < 8
    scheduler._start_again([running], [])
    assert (running.status, running.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    assert (scheduler.stats().num_swapped, manager.num_free_host_blocks) == (0, 8)
    assert list(scheduler.waiting) == [running]


def test_a_request_without_a_row_is_no_row_to_remove():
    scheduler, _ = make()
    scheduler._encoding._max_num_units = 1  # of which the item has 40 in each of 4 layers
    runner = FakeModelRunner(16, 4, encoder=FakeEncoder(SPEC))
    one = request("a", PICTURE)
    scheduler.add_request(one)
    answer = []
    for number in range(20):
        scheduled = scheduler.schedule(0.0)
        outputs = scheduler.update_from_output(scheduled, runner.execute_model(scheduled), 0.0).outputs
        answer += [token_id for message in outputs for token_id in message.new_token_ids]
        if not number:
            assert not scheduled.scheduled_requests
            scheduler._start_again(list(scheduler.running), [])
    seen = seen_ids(one.prompt_token_ids, one.media)
    expected = []
    for _ in range(3):
        expected.append(next_token(seen + expected))
    assert answer == expected


def test_what_steps_under_way_sample_is_void():
    scheduler, _ = make()
    scheduler.add_request(request("a"))
    first = scheduler.schedule(0.0)
    (running,) = scheduler.running
    scheduler._start_again([running], [])
    assert not scheduler.update_from_output(first, ModelRunnerOutput(["a"], [[9]]), 0.0).outputs
    again = scheduler.schedule(0.0)
    assert (again.removed_request_ids, [new.request_id for new in again.new_requests]) == (["a"], ["a"])
    assert again.scheduled_requests[0].num_computed_tokens == 4  # it may find what it has computed itself


@pytest.mark.parametrize("name", ["long_prefill_token_threshold", "min_stage_tokens"])
def test_a_limit_below_an_item_that_must_not_be_cut_is_refused(name):
    atomic = MediaSpec(8, {"image": 4}, True, {"image": 8})
    with pytest.raises(ValueError, match=rf"{name} \(5\) must be 0 or at least 8"):
        SchedulerConfig(media=atomic, **{name: 5})
    assert getattr(SchedulerConfig(media=atomic, **{name: 8}), name) == 8
