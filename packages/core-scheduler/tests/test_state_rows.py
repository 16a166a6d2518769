"""Chunks end where a state is kept, and each row of a step has its states."""

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeModelRunner
from llmstack_types import EngineCoreRequest, SamplingParams

kv_cache = pytest.importorskip("llmstack_kv_cache")


def scheduler(max_num_batched_tokens=100, interval=0, num_state_blocks=50, **options):
    config = SchedulerConfig(
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=200, state_snapshot_interval=interval, **options
    )
    return Scheduler(config, kv_cache.KVCacheManager(100, 8, num_state_blocks=num_state_blocks))


def request(name, length, max_tokens=1, first=0):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(name, list(range(first, first + length)), params)


def chunks(scheduler, *requests, runner=None):
    """The tokens after which the rows of each step end."""
    runner, ends = runner or FakeModelRunner(100, 8, num_state_blocks=50), []
    for one in requests:
        scheduler.add_request(one)
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(0.0)
        ends += [row.num_computed_tokens + row.num_scheduled_tokens for row in scheduled.scheduled_requests]
        assert len(scheduled.states) == len(scheduled.scheduled_requests)
        scheduler.update_from_output(scheduled, runner.execute_model(scheduled), 0.0)
    return ends


@pytest.mark.parametrize(
    ("budget", "interval", "length", "expected"),
    [
        (100, 0, 5, [5]),  # less than a block
        (100, 0, 8, [8]),
        (100, 0, 9, [8, 9]),
        (100, 0, 40, [32, 40]),
        (100, 0, 43, [40, 43]),
        (20, 0, 43, [16, 32, 40, 43]),  # chunks are of whole blocks
        (5, 0, 12, [5, 8, 12]),  # unless a block is too much
        (100, 16, 43, [16, 32, 40, 43]),
        (100, 9, 43, [16, 32, 40, 43]),  # rounded up to whole blocks
        (20, 24, 43, [16, 24, 40, 43]),
    ],
)
def test_chunks_of_a_prompt_end_where_states_are_kept(budget, interval, length, expected):
    assert chunks(scheduler(budget, interval), request("a", length)) == expected


def test_with_an_interval_only_its_states_are_kept():
    for interval, expected in ((0, 16), (24, 0)):
        one = scheduler(20, interval)
        chunks(one, request("a", 43))
        found, num_tokens = one.kv_cache_manager.get_computed_blocks("probe", [*range(20), 999])
        assert (num_tokens, len(found)) == (expected, 2)  # with the keys and values beyond the state


def test_a_chunk_ends_where_a_prefix_was_known_without_its_state():
    one, runner = scheduler(), FakeModelRunner(100, 8, num_state_blocks=50)
    chunks(one, request("a", 60), runner=runner)
    parted = EngineCoreRequest("b", [*range(30), *range(500, 540)], SamplingParams(max_tokens=1))
    assert chunks(one, parted, runner=runner) == [24, 64, 70]
    assert one.stats().prefix_tokens_without_state == 24
    third = EngineCoreRequest("c", [*range(30), *range(600, 640)], SamplingParams(max_tokens=1))
    assert chunks(one, third, runner=runner) == [64, 70]
    assert one.stats().prefix_tokens_without_state == 24


def test_keys_and_values_beyond_a_state_are_shared_and_not_written_again():
    """What is computed again, for the state alone, takes no block but those it has found."""
    one, runner = scheduler(), FakeModelRunner(100, 8, num_state_blocks=50)
    chunks(one, request("a", 60, max_tokens=20), runner=runner)
    long, parted = list(range(80)), [*range(70), *range(500, 507)]
    one.add_request(EngineCoreRequest("b", long, SamplingParams(max_tokens=9, ignore_eos=True)))
    runner.execute_model(one.schedule(0.0))
    one.add_request(EngineCoreRequest("c", parted, SamplingParams(max_tokens=2)))
    num_free = one.stats().num_free_blocks
    scheduled = one.schedule(0.0)
    (row,) = [row for row in scheduled.scheduled_requests if row.request_id == "c"]
    (new,) = scheduled.new_requests
    assert (row.num_computed_tokens, new.num_held_tokens, len(row.new_block_ids)) == (56, 64, 8)
    assert num_free - one.stats().num_free_blocks == 1  # the first of the tokens of its own come in the next step


def test_without_chunked_prefill_the_end_of_a_prompt_is_a_row_of_its_own():
    assert chunks(scheduler(200, enable_chunked_prefill=False), request("a", 60)) == [56, 60]


def test_a_model_without_states_has_none_in_its_steps():
    one = Scheduler(SchedulerConfig(), kv_cache.KVCacheManager(100, 8))
    one.add_request(request("a", 60))
    scheduled = one.schedule(0.0)
    assert scheduled.states == []
    assert [row.num_scheduled_tokens for row in scheduled.scheduled_requests] == [60]
