"""Nothing that a scheduler decides by is missing from its snapshots; replays of logs show that they can be restored."""

import inspect

import pytest
from core_scheduler_helpers.steps import make_request, step

from llmstack_core_scheduler import Request, Scheduler, SchedulerConfig, SpeculativeConfig, snapshot
from llmstack_core_scheduler.deadline_queue import DeadlineQueue
from llmstack_core_scheduler.fair_queue import _Tenant
from llmstack_core_scheduler.repetition import RepetitionDetector
from llmstack_core_scheduler.snapshot import num_snapshot_requests, restore_snapshot, take_snapshot
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import EngineCoreRequest, SamplingParams

# The configuration, what follows from the arrival of a request, and what no later decision depends on.
LEFT_OUT = {
    "_policy", "_config", "_block_size", "_has_windows", "_num_blocks", "_num_host_blocks", "_needs", "quantum",
    "_max_num_preemptions", "_has_host_blocks", "_manager", "has_source", "_max_num_step_tokens", "_smoothing",
    "_max_num_row_tokens",
    "_token_cost", "_max_num_indexed_tokens", "_min_repeats", "_start", "_kv_cache_manager",
    "num_prompt_tokens", "min_num_tokens", "eos_token_ids", "stop_token_ids", "ending_token_ids", "is_constrained",
    "prefix_salt", "wants_logprobs", "pools_whole_prompt", "is_finished",
}  # fmt: skip
SPECULATIVE = SpeculativeConfig("ngram", 3, is_adaptive=True)


def make(**changes):
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, **changes)
    return Scheduler(config, FakeKVCacheManager(16, 4))


def test_every_attribute_is_part_of_a_snapshot_or_left_out_on_purpose():
    scheduler = make(speculative=SPECULATIVE, policy="deadline")
    parts = [
        scheduler, scheduler._preemptor, scheduler._preemptor._policy, scheduler._forking, scheduler._drafting,
        scheduler._drafting._source, scheduler._drafting._lengths,
    ]  # fmt: skip
    names = {name for part in parts for name in vars(part)}
    for cls in (Request, DeadlineQueue, _Tenant, RepetitionDetector):
        names.update(name for one in cls.__mro__ for name in getattr(one, "__slots__", ()))
    source = inspect.getsource(snapshot)
    assert {name for name in names if name not in LEFT_OUT and name not in source} == set()


def test_a_restored_scheduler_has_the_same_snapshot():
    scheduler = make()
    scheduler.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=4)))
    scheduler.add_request(EngineCoreRequest("b", [1] * 20, SamplingParams(max_tokens=4)))
    scheduler.schedule(1.0)
    state, arrivals = take_snapshot(scheduler)
    assert num_snapshot_requests(scheduler) == len(arrivals) == 2
    restored = make()
    restore_snapshot(restored, state, arrivals)
    assert take_snapshot(restored) == (state, arrivals)
    assert [request.num_computed_tokens for request in restored.running] == [3, 13]


@pytest.mark.parametrize("policy", ["fair", "deadline"])
def test_tokens_and_shares_of_tenants_are_restored(policy):
    scheduler = make(policy=policy)
    for number in range(9):  # more than run at once
        scheduler.add_request(make_request(str(number), 4, max_tokens=3, tenant="abc"[number % 3]))
    for _ in range(4):
        step(scheduler)
        restored = make(policy=policy)
        restore_snapshot(restored, *take_snapshot(scheduler))
        assert take_snapshot(restored) == take_snapshot(scheduler)
        tokens, expected = ([request.token_ids for request in one.running] for one in (restored, scheduler))
        assert tokens == expected
        order = [[request.request_id for request in one.waiting] for one in (restored, scheduler)]
        assert order[0] == order[1]


def test_a_snapshot_that_is_none_is_refused():
    state, _ = take_snapshot(make())
    with pytest.raises(ValueError, match="no snapshot of a scheduler"):
        restore_snapshot(make(), {name: value for name, value in state.items() if name != "queue"}, [])


def test_a_scheduler_with_a_source_of_drafts_of_its_own_has_no_snapshots():
    config = SchedulerConfig(max_num_batched_tokens=64, max_model_len=64)
    scheduler = Scheduler(config, FakeKVCacheManager(16, 4), draft_source=object())
    with pytest.raises(ValueError, match="no snapshots of a object"):
        take_snapshot(scheduler)
