"""What the results of a step do: ends, errors, log-probabilities, aborts and refusals."""

from dataclasses import replace

import pytest
from core_scheduler_helpers.steps import (
    answer,
    make_request,
    make_scheduler,
    rows_of,
    status_of,
    step,
)

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import (
    FinishReason,
    InvalidRequestError,
    ModelRunnerOutput,
    SamplingParams,
    StructuredOutputsParams,
    TokenLogprobs,
)
from llmstack_types.engine_core import TokenIds


def test_blocks_are_free_at_once_when_a_request_ends():
    scheduler = make_scheduler(num_blocks=10)
    scheduler.add_request(make_request("a", 40, max_tokens=2))
    step(scheduler)
    assert scheduler.stats().num_free_blocks == 7
    assert step(scheduler)[1]["a"].finish_reason is FinishReason.LENGTH
    assert scheduler.stats().num_free_blocks == 10


def test_the_runner_is_notified_of_an_ended_row_by_one_more_step():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, max_tokens=1))
    step(scheduler)
    assert scheduler.has_unfinished_requests()
    scheduled = scheduler.schedule(0.0)
    assert scheduled.is_empty()
    assert scheduled.removed_request_ids == ["a"]
    assert scheduler.update_from_output(scheduled, ModelRunnerOutput(), 0.0).outputs == []
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize(
    ("token_id", "params", "finish_reason", "stop_reason"),
    [
        (50, {}, FinishReason.STOP, None),
        (50, {"ignore_eos": True}, None, None),
        (51, {"stop_token_ids": [51]}, FinishReason.STOP, 51),
        (50, {"stop_token_ids": [50]}, FinishReason.STOP, None),
        (51, {"stop_token_ids": [51], "min_tokens": 2}, None, None),
        (50, {"min_tokens": 2}, None, None),
        (50, {"min_tokens": 2, "structured_outputs": StructuredOutputsParams(regex="a*")}, FinishReason.STOP, None),
        (50, {"max_tokens": 1}, FinishReason.STOP, None),
        (7, {"max_tokens": 1}, FinishReason.LENGTH, None),
        (7, {"max_tokens": 1, "min_tokens": 1}, FinishReason.LENGTH, None),
    ],
)
def test_why_a_first_token_ends_a_request(token_id, params, finish_reason, stop_reason):
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, params=SamplingParams(**params), eos_token_ids=(50,)))
    message = step(scheduler, a=token_id)[1]["a"]
    assert message.new_token_ids == [token_id]
    assert (message.finish_reason, message.stop_reason) == (finish_reason, stop_reason)


def test_without_max_tokens_a_request_ends_with_the_context():
    scheduler = make_scheduler(max_model_len=6)
    scheduler.add_request(make_request("a", 4, params=SamplingParams(max_tokens=None)))
    assert step(scheduler)[1]["a"].finish_reason is None
    assert step(scheduler)[1]["a"].finish_reason is FinishReason.LENGTH


def test_max_tokens_0_computes_the_prompt_and_tells_no_token():
    scheduler = make_scheduler(max_model_len=4)
    scheduler.add_request(make_request("a", 4, params=SamplingParams(max_tokens=0, prompt_logprobs=0)))
    scheduled = scheduler.schedule(0.0)
    entries = [TokenLogprobs((position,), (-1.0,), 1) for position in range(3)]
    output = ModelRunnerOutput(["a"], [[7]], prompt_logprobs={"a": entries})
    (message,) = scheduler.update_from_output(scheduled, output, 0.0).outputs
    assert message.new_token_ids == []
    assert message.finish_reason is FinishReason.LENGTH
    assert message.prompt_logprobs == [None, *entries]
    assert message.num_cached_tokens == 0


def test_an_error_of_one_row_ends_that_request_alone():
    scheduler = make_scheduler()
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, 4))
    scheduled = scheduler.schedule(0.0)
    output = ModelRunnerOutput(["a", "b"], [[], [7]], errors={"a": "out of ideas"})
    first, second = scheduler.update_from_output(scheduled, output, 0.0).outputs
    assert (first.request_id, first.finish_reason, first.error) == ("a", FinishReason.ERROR, "out of ideas")
    assert (second.request_id, second.new_token_ids, second.error) == ("b", [7], None)
    assert list(status_of(scheduler)) == ["b"]
    assert scheduler.schedule(0.0).removed_request_ids == ["a"]


def test_what_a_failed_row_was_to_write_is_found_by_no_request():
    scheduler = make_scheduler(block_size=4)
    scheduler.add_request(make_request("a", 0, prompt=list(range(12))))
    scheduled = scheduler.schedule(0.0)
    scheduler.update_from_output(scheduled, ModelRunnerOutput(["a"], [[]], errors={"a": "no memory"}), 0.0)
    scheduler.add_request(make_request("b", 0, prompt=list(range(12))))
    assert rows_of(scheduler.schedule(0.0)) == {"b": 12}


@pytest.mark.parametrize("num_prefix_tokens", [0, 8])
def test_all_that_a_failed_row_wrote_is_forgotten_and_what_it_had_found_is_not(num_prefix_tokens: int):
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=8)
    if num_prefix_tokens:  # another request has written the first blocks, and has ended
        scheduler.add_request(make_request("before", 0, max_tokens=1, prompt=list(range(num_prefix_tokens))))
        scheduled = scheduler.schedule(0.0)
        scheduler.update_from_output(scheduled, ModelRunnerOutput(["before"], [[7]]), 0.0)
    scheduler.add_request(make_request("a", 0, prompt=list(range(24))))
    for _ in range((24 - num_prefix_tokens) // 8 - 1):  # its numbers may be wrong already, and no one looks at them
        scheduled = scheduler.schedule(0.0)
        scheduler.update_from_output(scheduled, ModelRunnerOutput(["a"], [[]]), 0.0)
    scheduled = scheduler.schedule(0.0)
    scheduler.update_from_output(scheduled, ModelRunnerOutput(["a"], [[]], errors={"a": "no numbers"}), 0.0)
    scheduler.add_request(make_request("b", 0, prompt=list(range(24))))
    assert scheduler.schedule(0.0).scheduled_requests[0].num_computed_tokens == num_prefix_tokens


def test_a_row_that_should_have_sampled_and_did_not_fails_instead_of_hanging():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    scheduled = scheduler.schedule(0.0)
    (message,) = scheduler.update_from_output(scheduled, ModelRunnerOutput(["a"], [[]]), 0.0).outputs
    assert message.finish_reason is FinishReason.ERROR


# --- log-probabilities --------------------------------------------------------------------------------------------


def test_prompt_logprobs_come_once_with_the_first_token_and_bypass_the_prefix_cache():
    manager = FakeKVCacheManager(10, 4)
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=4, max_model_len=64), manager)
    scheduler.add_request(make_request("warm", 0, prompt=list(range(10)), max_tokens=1))
    while scheduler.has_unfinished_requests():
        step(scheduler)
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    scheduler.add_request(make_request("a", 0, prompt=list(range(10)), params=params))
    entries = [TokenLogprobs((position,), (-1.0,), 1) for position in range(1, 10)]
    messages = []
    for chunk in (entries[:4], entries[4:8], entries[8:], []):
        scheduled = scheduler.schedule(0.0)
        output = ModelRunnerOutput(["a"], [[7]], prompt_logprobs={"a": chunk})
        messages += scheduler.update_from_output(scheduled, output, 0.0).outputs
    first, second = messages
    assert first.prompt_logprobs == [None, *entries]
    assert first.num_cached_tokens == 0
    assert first.logprobs is None
    assert second.prompt_logprobs is None


def test_prompt_logprobs_of_a_prompt_recomputed_half_way_are_not_doubled():
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=6)
    scheduler.add_request(make_request("old", 4, max_tokens=12))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scheduler.add_request(make_request("young", 12, params=params))
    entries = [TokenLogprobs((position,), (-1.0,), 1) for position in range(1, 12)]
    messages = []
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(0.0)
        rows = {row.request_id: row for row in scheduled.scheduled_requests}
        output = answer(scheduled)
        if "young" in rows:
            start = rows["young"].num_computed_tokens
            chunk = entries[start : start + rows["young"].num_scheduled_tokens]
            output = ModelRunnerOutput(output.request_ids, output.sampled_token_ids, prompt_logprobs={"young": chunk})
        messages += scheduler.update_from_output(scheduled, output, 0.0).outputs
    (young,) = [message for message in messages if message.request_id == "young"]
    assert scheduler.stats().num_preemptions == 1
    assert young.prompt_logprobs == [None, *entries]


def test_logprobs_are_passed_on_only_to_who_asked():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("asked", 4, params=SamplingParams(max_tokens=3, logprobs=0)))
    scheduler.add_request(make_request("not", 4))
    entry = TokenLogprobs((7,), (-1.0,), 1)
    for _ in range(2):
        scheduled = scheduler.schedule(0.0)
        output = ModelRunnerOutput(["asked", "not"], [[7], [7]], logprobs={"asked": [entry], "not": [entry]})
        first, second = scheduler.update_from_output(scheduled, output, 0.0).outputs
        assert first.logprobs == [entry]
        assert second.logprobs is None


# --- abort --------------------------------------------------------------------------------------------------------


def test_abort_between_schedule_and_update_drops_the_row_even_if_the_id_is_used_again():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    scheduler.add_request(make_request("b", 4))
    scheduled = scheduler.schedule(0.0)
    scheduler.abort_requests(["a"])
    scheduler.add_request(make_request("a", 4))
    messages = scheduler.update_from_output(scheduled, answer(scheduled), 0.0).outputs
    assert [message.request_id for message in messages] == ["b"]
    scheduled = scheduler.schedule(0.0)
    assert scheduled.removed_request_ids == ["a"]
    assert [request.token_ids for request in scheduled.new_requests] == [make_request("a", 4).prompt_token_ids]


def test_abort_of_a_waiting_request_is_no_matter_of_the_runner():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    scheduler.abort_requests(["a", "a", "unknown"])
    assert not scheduler.has_unfinished_requests()
    assert scheduler.schedule(0.0).removed_request_ids == []


def test_what_exactly_fits_the_context_is_admitted_and_one_more_is_refused():
    scheduler = make_scheduler(max_model_len=20)
    scheduler.add_request(make_request("fits", 12, max_tokens=8))
    for num_tokens, max_tokens in ((12, 9), (13, 8), (20, 1), (20, None), (21, None), (21, 0)):
        with pytest.raises(InvalidRequestError, match="maximum context length is 20 tokens") as caught:
            scheduler.add_request(make_request("x", num_tokens, max_tokens))
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"
    scheduler.add_request(make_request("scored", 20, max_tokens=0))
    assert [request.request_id for request in scheduler.waiting] == ["fits", "scored"]


def test_what_exactly_fits_the_pool_runs_to_its_end_and_one_more_is_refused():
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    with pytest.raises(InvalidRequestError, match="room for 8 tokens") as caught:
        scheduler.add_request(make_request("x", 5, max_tokens=5))
    assert caught.value.code == "context_length_exceeded"
    scheduler.add_request(make_request("a", 5, max_tokens=4))  # its last token needs no slot
    for _ in range(3):
        assert step(scheduler)[1]["a"].finish_reason is None
    assert step(scheduler)[1]["a"].finish_reason is FinishReason.LENGTH
    assert scheduler.stats().num_preemptions == 0


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequestError, match="no tokens") as caught:
        make_scheduler().add_request(make_request("a", 0))
    assert caught.value.code == "empty_array"


@pytest.mark.parametrize("token_id", [1.5, 2.0, "1", None, -1, 2**31])
def test_a_prompt_of_anything_but_token_ids_is_refused_before_a_step_meets_it(token_id):
    scheduler = make_scheduler()
    for fields in ({"prompt_token_ids": [1, token_id]}, {"output_token_ids": (1, token_id)}):
        wrong = replace(make_request("wrong", 3, max_tokens=8), **fields)
        with pytest.raises(InvalidRequestError) as caught:
            scheduler.add_request(wrong)
        assert caught.value.param in fields
    assert not scheduler.has_unfinished_requests()


def test_of_token_ids_with_a_known_largest_one_that_is_looked_at():
    scheduler = make_scheduler()
    wrong = replace(make_request("wrong", 3), prompt_token_ids=TokenIds([1, 2**31], 2**31))
    with pytest.raises(InvalidRequestError):
        scheduler.add_request(wrong)
    scheduler.add_request(replace(wrong, prompt_token_ids=TokenIds([1, 2**31], 2**31 - 1)))


def test_a_duplicate_id_is_refused_and_the_first_one_is_unharmed():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, max_tokens=1))
    with pytest.raises(InvalidRequestError, match="'a' is in use") as caught:
        scheduler.add_request(make_request("a", 9))
    assert caught.value.code == "duplicate_request_id"
    rows, messages = step(scheduler)
    assert rows == {"a": 4}
    assert messages["a"].finish_reason is FinishReason.LENGTH
    scheduler.add_request(make_request("a", 9))


# --- the contract with the engine core ----------------------------------------------------------------------------


def test_results_that_do_not_belong_to_a_step_are_refused_and_change_nothing():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    scheduled = scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="sampled_token_ids"):
        scheduler.update_from_output(scheduled, ModelRunnerOutput(), 0.0)
    scheduler.update_from_output(scheduled, answer(scheduled), 0.0)
    with pytest.raises(ValueError, match="step 1"):
        scheduler.update_from_output(scheduled, answer(scheduled), 0.0)


def test_results_in_another_order_than_the_rows_are_refused_and_change_nothing():
    scheduler = make_scheduler()
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, 4))
    scheduled = scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="request_ids"):
        scheduler.update_from_output(scheduled, ModelRunnerOutput(["b", "a"], [[5], [6]]), 0.0)
    outputs = scheduler.update_from_output(scheduled, ModelRunnerOutput(["a", "b"], [[5], [6]]), 0.0).outputs
    assert [(output.request_id, output.new_token_ids) for output in outputs] == [("a", [5]), ("b", [6])]


def test_statistics_count_what_happened():
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=1)
    for request_id in "ab":
        scheduler.add_request(make_request(request_id, 20, max_tokens=2))
    scheduled = scheduler.schedule(1.0)
    outputs = scheduler.update_from_output(scheduled, answer(scheduled), 2.5)
    assert outputs.timestamp_s == 2.5
    stats = outputs.scheduler_stats
    assert (stats.step, stats.num_running, stats.num_waiting, stats.num_scheduled_tokens) == (1, 1, 1, 20)
    assert (stats.num_free_blocks, stats.num_blocks) == (8, 10)
    assert stats.kv_cache_usage == pytest.approx(0.2)


def test_the_prefix_cache_is_reset_only_while_nothing_runs():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, max_tokens=1))
    assert scheduler.reset_prefix_cache()
    scheduler.schedule(0.0)
    assert not scheduler.reset_prefix_cache()
