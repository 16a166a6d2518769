"""The next step may be scheduled before the last one's tokens are known, and no output changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_core_scheduler import AlwaysSwap, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner
from llmstack_types import EngineCoreRequest, FinishReason, ModelRunnerOutput, SamplingParams, TokenLogprobs


def rows_of(scheduled):
    return {row.request_id: row.num_scheduled_tokens for row in scheduled.scheduled_requests}


def make_scheduler(num_blocks=100, **config):
    manager = FakeKVCacheManager(num_blocks, 4)
    return Scheduler(SchedulerConfig(**({"max_num_batched_tokens": 64, "max_model_len": 64} | config)), manager)


def request_of(request_id, length, max_tokens, **kwargs):
    return EngineCoreRequest(request_id, list(range(length)), SamplingParams(max_tokens=max_tokens), **kwargs)


def answer(scheduled, token_id=7):
    rows = scheduled.scheduled_requests
    return ModelRunnerOutput([row.request_id for row in rows], [[token_id] for _ in rows])


def test_a_row_is_scheduled_ahead_for_the_token_that_is_being_sampled():
    scheduler = make_scheduler()
    scheduler.add_request(request_of("a", 4, 9))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert (rows_of(first), rows_of(second)) == ({"a": 4}, {"a": 1})
    assert second.scheduled_requests[0].num_computed_tokens == 4
    for scheduled in (first, second):
        (message,) = scheduler.update_from_output(scheduled, answer(scheduled), 0.0).outputs
        assert message.new_token_ids == [7]


def test_the_statistics_of_a_step_count_the_tokens_of_that_step():
    scheduler = make_scheduler()
    scheduler.add_request(request_of("a", 4, 3))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    counts = []
    for scheduled in (first, second, None):
        scheduled = scheduled or scheduler.schedule(0.0)
        stats = scheduler.update_from_output(scheduled, answer(scheduled), 0.0).scheduler_stats
        counts.append(stats.num_scheduled_tokens)
    assert counts == [4, 1, 1]


def test_nothing_is_scheduled_after_a_token_that_is_sure_to_be_the_last():
    scheduler = make_scheduler()
    scheduler.add_request(request_of("a", 4, 1))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert (rows_of(first), rows_of(second)) == ({"a": 4}, {})
    assert scheduler.update_from_output(first, answer(first), 0.0).outputs[0].finish_reason is FinishReason.LENGTH


def test_what_was_scheduled_ahead_of_an_end_is_dropped():
    scheduler = make_scheduler()
    scheduler.add_request(request_of("a", 4, 9, eos_token_ids=(7,)))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert scheduler.update_from_output(first, answer(first), 0.0).outputs[0].finish_reason is FinishReason.STOP
    assert scheduler.schedule(0.0).removed_request_ids == ["a"]
    assert scheduler.update_from_output(second, answer(second), 0.0).outputs == []


def test_steps_are_updated_in_their_order():
    scheduler = make_scheduler()
    scheduler.add_request(request_of("a", 4, 9))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="step 2"):
        scheduler.update_from_output(second, answer(second), 0.0)
    scheduler.update_from_output(first, answer(first), 0.0)
    scheduler.update_from_output(second, answer(second), 0.0)


def test_a_request_preempted_while_its_token_is_sampled_keeps_the_token_and_returns_with_it():
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add_request(request_of("old", 4, 6))
    scheduler.add_request(EngineCoreRequest("young", [9, 8, 7], SamplingParams(max_tokens=5)))
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    third = scheduler.schedule(0.0)
    assert third.removed_request_ids == ["young"]
    for scheduled in (first, second, third):
        scheduler.update_from_output(scheduled, answer(scheduled), 0.0)
    scheduler.abort_requests(["old"])
    (young,) = scheduler.schedule(0.0).new_requests
    assert young.token_ids == [9, 8, 7, 7, 7]


def test_a_request_swapped_out_while_its_last_token_is_sampled_gets_no_further_row():
    config = SchedulerConfig(max_num_batched_tokens=64, max_model_len=12)
    scheduler = Scheduler(config, FakeKVCacheManager(3, 4, num_host_blocks=1), preemption=AlwaysSwap())
    scheduler.add_request(request_of("old", 8, 4))
    scheduler.add_request(request_of("young", 4, 1))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert (rows_of(first), rows_of(second)) == ({"old": 8, "young": 4}, {"old": 1})
    assert len(second.swap_outs) == 1
    scheduler.abort_requests(["old"])  # now there is room again
    third = scheduler.schedule(0.0)
    assert rows_of(third) == {}
    (message,) = scheduler.update_from_output(first, answer(first), 0.0).outputs
    assert (message.request_id, message.finish_reason) == ("young", FinishReason.LENGTH)
    assert scheduler.stats().num_free_host_blocks == 1


def test_prompt_logprobs_of_a_chunk_that_was_lost_are_not_counted_twice():
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=5)
    scheduler.add_request(request_of("old", 4, 9))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scheduler.add_request(EngineCoreRequest("young", list(range(20, 32)), params))
    messages, steps = [], []
    while scheduler.has_unfinished_requests() or steps:
        steps.append(scheduler.schedule(0.0))
        while len(steps) > (1 if steps and steps[-1].scheduled_requests else 0):
            scheduled = steps.pop(0)
            entries = {
                row.request_id: [
                    TokenLogprobs((position,), (0.0,), 1)
                    for position in range(row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens)
                    if position < 11
                ]
                for row in scheduled.scheduled_requests
                if row.request_id == "young"
            }
            rows = scheduled.scheduled_requests
            output = ModelRunnerOutput([r.request_id for r in rows], [[7] for _ in rows], prompt_logprobs=entries)
            messages += scheduler.update_from_output(scheduled, output, 0.0).outputs
    assert scheduler.stats().num_preemptions > 0
    (young,) = [message for message in messages if message.request_id == "young"]
    assert [entry and entry.token_ids[0] for entry in young.prompt_logprobs] == [None, *range(11)]


def run(workload, num_ahead):
    """All messages of each request, over one schedule of arrivals and aborts."""
    num_blocks, block_size, config, arrivals, aborts = workload
    scheduler = Scheduler(config, FakeKVCacheManager(num_blocks, block_size, num_host_blocks=5))
    runner = FakeModelRunner(num_blocks, block_size, 50, num_host_blocks=5)
    messages, steps, number = {}, [], 0
    pending = list(arrivals)
    while pending or steps or scheduler.has_unfinished_requests():
        while pending and pending[0][0] <= number:
            request = pending.pop(0)[1]
            scheduler.add_request(request)
            messages[request.request_id] = []
        scheduled = scheduler.schedule(0.0)
        steps.append((scheduled, runner.execute_model(scheduled)))
        # An abort comes at a place of the text, since a step of one run is not that of the other.
        for request_id in [
            name for name, length in aborts.items() if name in messages and len(messages[name]) >= length
        ]:
            scheduler.abort_requests([request_id])
        while len(steps) > (num_ahead if scheduled.scheduled_requests else 0):
            for message in scheduler.update_from_output(*steps.pop(0), 0.0).outputs:
                messages[message.request_id].append((message.new_token_ids, message.finish_reason, message.stop_reason))
        number += 1
    return {name: entries[: aborts.get(name, 99)] for name, entries in messages.items()}, scheduler.stats()


@st.composite
def workloads(draw):
    num_blocks, block_size = draw(st.integers(2, 20)), draw(st.integers(1, 8))
    config = SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 20)),
        max_model_len=min(num_blocks * block_size, 60),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
    )
    arrivals = []
    for number in range(draw(st.integers(1, 7))):
        length = draw(st.integers(1, config.max_model_len))
        shared = draw(st.integers(0, length))
        prompt = [1] * shared + [number + 2] * (length - shared)
        max_tokens = draw(st.integers(0, min(config.max_model_len - length, 20)))
        params = SamplingParams(max_tokens=max_tokens, min_tokens=draw(st.integers(0, 3)), stop_token_ids=(3, 4))
        request = EngineCoreRequest(str(number), prompt, params, (1, 2), priority=draw(st.integers(0, 1)))
        arrivals.append((draw(st.integers(0, 10)), request))
    arrivals.sort(key=lambda arrival: arrival[0])
    aborts = draw(st.dictionaries(st.sampled_from("0123456"), st.integers(0, 10), max_size=2))
    return num_blocks, block_size, config, arrivals, aborts


@settings(max_examples=150, deadline=None)
@given(workloads(), st.integers(1, 3))
def test_no_output_depends_on_scheduling_ahead(workload, num_ahead):
    assert run(workload, num_ahead)[0] == run(workload, 0)[0]


def test_prompt_logprobs_that_were_under_way_when_the_kv_cache_was_lost_come_with_their_token():
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add_request(request_of("old", 4, 6))
    params = SamplingParams(max_tokens=5, prompt_logprobs=0)
    scheduler.add_request(EngineCoreRequest("young", [9, 8, 7], params))
    steps = [scheduler.schedule(0.0) for _ in range(3)]
    assert steps[2].removed_request_ids == ["young"]
    entries = [TokenLogprobs((token,), (0.0,), 1) for token in (8, 7)]
    ids = [row.request_id for row in steps[0].scheduled_requests]
    output = ModelRunnerOutput(ids, [[7] for _ in ids], prompt_logprobs={"young": entries})
    messages = scheduler.update_from_output(steps[0], output, 0.0).outputs
    (young,) = [message for message in messages if message.request_id == "young"]
    assert (young.new_token_ids, young.prompt_logprobs) == ([7], [None, *entries])
