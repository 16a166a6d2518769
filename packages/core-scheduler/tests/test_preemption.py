"""Swap or recompute: the choice of the policy, by cost where it was measured."""

import pytest

from llmstack_core_scheduler import AlwaysRecompute, AlwaysSwap, CheapestPreemption, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams


def test_what_is_cheaper_is_preferred():
    policy = CheapestPreemption(token_s=1.0, block_s=4.0)
    assert policy.prefers_swap(num_computed_tokens=17, num_blocks=2)
    assert not policy.prefers_swap(num_computed_tokens=16, num_blocks=2)


def test_costs_follow_the_steps():
    policy = CheapestPreemption(token_s=1.0, block_s=1.0, smoothing=0.5)
    policy.observe(num_tokens=100, num_rows=2, num_copied_blocks=0, duration_s=300.0)
    assert policy.token_s == 2.0
    policy.observe(num_tokens=10, num_rows=2, num_copied_blocks=5, duration_s=45.0)
    assert policy.block_s == 3.0
    policy.observe(num_tokens=2, num_rows=2, num_copied_blocks=0, duration_s=99.0)  # decode tells nothing of recompute
    assert policy.token_s == 2.0


@pytest.mark.parametrize("name", ["token_s", "block_s", "smoothing"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cost_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        CheapestPreemption(**{name: value})


def preempted(preemption, num_host_blocks=8):
    manager = FakeKVCacheManager(3, 4, num_host_blocks=num_host_blocks)
    scheduler = Scheduler(SchedulerConfig(max_model_len=12), manager, preemption=preemption)
    for request_id in "ab":
        scheduler.add_request(EngineCoreRequest(request_id, [ord(request_id)] * 4, SamplingParams(max_tokens=8)))
    steps = []
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(0.0)
        rows = scheduled.scheduled_requests
        steps.append(scheduled)
        output = ModelRunnerOutput([row.request_id for row in rows], [[7] for _ in rows])
        scheduler.update_from_output(scheduled, output, 0.0)
    return steps, scheduler.stats()


def test_a_swapped_request_is_resumed_as_a_new_one_that_has_computed_most():
    steps, stats = preempted(AlwaysSwap())
    (out,) = [scheduled for scheduled in steps if scheduled.swap_outs]
    (back,) = [scheduled for scheduled in steps if scheduled.swap_ins]
    assert out.removed_request_ids == ["b"]
    assert [host for host, _ in back.swap_ins] == [host for _, host in out.swap_outs]
    (row,) = [row for row in back.scheduled_requests if row.request_id == "b"]
    assert [request.request_id for request in back.new_requests] == ["b"]
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (4, 1)
    assert row.new_block_ids[0] == back.swap_ins[0][1]
    assert (stats.num_preemptions, stats.num_swap_preemptions) == (1, 1)
    assert stats.num_swapped_out_blocks == stats.num_swapped_in_blocks == 1


@pytest.mark.parametrize(("preemption", "num_host_blocks"), [(AlwaysRecompute(), 8), (AlwaysSwap(), 0), (None, 0)])
def test_without_a_wish_or_without_host_blocks_it_is_recompute(preemption, num_host_blocks):
    steps, stats = preempted(preemption, num_host_blocks)
    assert not any(scheduled.swap_outs or scheduled.swap_ins for scheduled in steps)
    assert (stats.num_preemptions, stats.num_swap_preemptions) == (1, 0)
