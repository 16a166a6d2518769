"""One behaviour at a time: running, waiting, preemption, and the messages of a step."""

import pytest

from llmstack_core_scheduler import RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner, next_token
from llmstack_types import (
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    ModelRunnerOutput,
    SamplingParams,
    TokenLogprobs,
)


def make_request(request_id, num_tokens, max_tokens=100, **kwargs):
    params = kwargs.pop("params", SamplingParams(max_tokens=max_tokens))
    prompt = kwargs.pop("prompt", [hash_of(request_id, position) for position in range(num_tokens)])
    return EngineCoreRequest(request_id, prompt, params, **kwargs)


def hash_of(request_id, position):
    return sum(map(ord, request_id)) * 1000 + position


def make_scheduler(num_blocks=100, block_size=16, **config):
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}
    return Scheduler(SchedulerConfig(**(defaults | config)), FakeKVCacheManager(num_blocks, block_size))


def rows_of(scheduled):
    return {row.request_id: row.num_scheduled_tokens for row in scheduled.scheduled_requests}


def answer(scheduled, **tokens):
    """What a runner would return: a token for each row that samples, 7 unless `tokens` names another."""
    rows = scheduled.scheduled_requests
    return ModelRunnerOutput([row.request_id for row in rows], [[tokens.get(row.request_id, 7)] for row in rows])


def step(scheduler, **tokens):
    """One whole step; the rows and the messages by request id."""
    scheduled = scheduler.schedule(0.0)
    messages = scheduler.update_from_output(scheduled, answer(scheduled, **tokens), 0.0).outputs
    return rows_of(scheduled), {message.request_id: message for message in messages}


def status_of(scheduler):
    return {request.request_id: request.status for request in [*scheduler.running, *scheduler.waiting]}


# --- one budget, prefill and decode alike -------------------------------------------------------------------------


def test_three_decodes_and_a_prefill_of_50_are_53_tokens_of_one_step():
    scheduler = make_scheduler()
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, 5))
    step(scheduler)
    scheduler.add_request(make_request("d", 50))
    scheduled = scheduler.schedule(0.0)
    assert rows_of(scheduled) == {"a": 1, "b": 1, "c": 1, "d": 50}
    assert scheduled.total_num_scheduled_tokens == 53


def worked_scenario(**config):
    """C runs and stands before a block boundary; A (50 tokens) and B (30) arrive; 20 of 21 blocks are free."""
    scheduler = make_scheduler(num_blocks=21, max_num_batched_tokens=64, max_model_len=64, **config)
    scheduler.add_request(make_request("C", 16, max_tokens=10))
    step(scheduler)
    assert scheduler.stats().num_free_blocks == 20
    scheduler.add_request(make_request("A", 50, max_tokens=10))
    scheduler.add_request(make_request("B", 30, max_tokens=10))
    return scheduler


def test_worked_scenario_c_and_a_are_51_of_64_tokens_and_b_waits():
    scheduler = worked_scenario(enable_chunked_prefill=False)
    scheduled = scheduler.schedule(0.0)
    assert rows_of(scheduled) == {"C": 1, "A": 50}
    assert scheduled.total_num_scheduled_tokens == 51
    assert [len(row.new_block_ids) for row in scheduled.scheduled_requests] == [1, 4]
    assert scheduler.stats().num_free_blocks == 15
    assert status_of(scheduler)["B"] is RequestStatus.WAITING


def test_worked_scenario_with_chunked_prefill_b_takes_the_13_tokens_left():
    scheduler = worked_scenario()
    assert rows_of(scheduler.schedule(0.0)) == {"C": 1, "A": 50, "B": 13}


def test_five_requests_join_and_leave_during_three_iterations():
    scheduler = make_scheduler(max_num_seqs=3)
    for request_id, max_tokens in (("r1", 1), ("r2", 2), ("r3", 3), ("r4", 1), ("r5", 1)):
        scheduler.add_request(make_request(request_id, 4, max_tokens))
    iterations = [step(scheduler) for _ in range(3)]
    assert [rows for rows, _ in iterations] == [
        {"r1": 4, "r2": 4, "r3": 4},
        {"r2": 1, "r3": 1, "r4": 4},
        {"r3": 1, "r5": 4},
    ]
    finished = [[name for name, message in messages.items() if message.finish_reason] for _, messages in iterations]
    assert finished == [["r1"], ["r2", "r4"], ["r3", "r5"]]
    assert not scheduler.running
    assert not scheduler.waiting


def test_a_long_prompt_is_computed_in_chunks_and_samples_once():
    scheduler = make_scheduler(max_num_batched_tokens=20)
    scheduler.add_request(make_request("a", 50))
    steps = [step(scheduler) for _ in range(4)]
    assert [rows["a"] for rows, _ in steps] == [20, 20, 10, 1]
    assert [bool(messages) for _, messages in steps] == [False, False, True, True]


def test_a_decode_never_starves_behind_a_prefill():
    scheduler = make_scheduler(max_num_batched_tokens=16, policy="priority")
    scheduler.add_request(make_request("decode", 4, priority=1))
    step(scheduler)
    scheduler.add_request(make_request("long", 100, priority=0))
    for _ in range(5):
        rows, _ = step(scheduler)
        assert rows["decode"] == 1
        assert rows["long"] == 15


def test_the_long_prefill_threshold_leaves_room_for_others():
    scheduler = make_scheduler(long_prefill_token_threshold=10)
    scheduler.add_request(make_request("long", 100))
    scheduler.add_request(make_request("short", 5))
    assert step(scheduler)[0] == {"long": 10, "short": 5}
    assert step(scheduler)[0] == {"long": 10, "short": 1}


# --- each condition of admission alone ----------------------------------------------------------------------------


def test_max_num_seqs_alone_keeps_a_request_waiting():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_request("a", 4))
    scheduler.add_request(make_request("b", 4))
    assert step(scheduler)[0] == {"a": 4}
    scheduler.abort_requests(["a"])
    assert step(scheduler)[0] == {"b": 4}


def test_missing_blocks_alone_keep_a_request_waiting():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add_request(make_request("a", 33, max_tokens=2))
    scheduler.add_request(make_request("b", 17, max_tokens=2))
    assert step(scheduler)[0] == {"a": 33}
    assert step(scheduler)[0] == {"a": 1}
    assert step(scheduler)[0] == {"b": 17}


def test_a_spent_budget_alone_keeps_a_request_waiting():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 8))
    scheduler.add_request(make_request("b", 4))
    assert step(scheduler)[0] == {"a": 8}
    assert step(scheduler)[0] == {"a": 1, "b": 4}


def test_a_long_prompt_is_not_begun_until_all_of_it_has_room():
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=16)
    scheduler.add_request(make_request("a", 16, max_tokens=2))
    scheduler.add_request(make_request("b", 90, max_tokens=2))
    step(scheduler)
    assert step(scheduler)[0] == {"a": 1}
    assert step(scheduler)[0] == {"b": 16}


def test_no_more_requests_run_than_a_step_has_tokens():
    scheduler = make_scheduler(max_num_batched_tokens=2)
    for request_id in "abc":
        scheduler.add_request(make_request(request_id, 1))
    assert step(scheduler)[0] == {"a": 1, "b": 1}
    assert step(scheduler)[0] == {"a": 1, "b": 1}


# --- order --------------------------------------------------------------------------------------------------------


def test_first_come_first_served_keeps_the_order_of_arrival_among_equals():
    scheduler = make_scheduler(max_num_seqs=1)
    for request_id in ("10", "9", "8"):
        scheduler.add_request(make_request(request_id, 1, max_tokens=1, priority=-int(request_id)))
    assert [list(step(scheduler)[0]) for _ in range(3)] == [["10"], ["9"], ["8"]]


def test_first_come_goes_by_the_senders_time_of_arrival():
    scheduler = make_scheduler(max_num_seqs=1)
    for request_id, arrival_time_s in (("second", 2.0), ("first", 1.0)):
        scheduler.add_request(make_request(request_id, 1, max_tokens=1, arrival_time_s=arrival_time_s))
    assert [list(step(scheduler)[0]) for _ in range(2)] == [["first"], ["second"]]


def test_priority_goes_before_arrival():
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    for request_id, priority, arrival_time_s in (("low", 5, 0.0), ("late", 0, 2.0), ("early", 0, 1.0)):
        scheduler.add_request(
            make_request(request_id, 1, max_tokens=1, priority=priority, arrival_time_s=arrival_time_s)
        )
    assert [list(step(scheduler)[0]) for _ in range(3)] == [["early"], ["late"], ["low"]]


def test_another_policy_is_one_object():
    class ShortestFirst:
        def rank(self, arrival, number):
            return (len(arrival.prompt_token_ids), number)

    config = SchedulerConfig(max_num_seqs=1, max_model_len=512)
    scheduler = Scheduler(config, FakeKVCacheManager(100), ShortestFirst())
    scheduler.add_request(make_request("long", 9, max_tokens=1))
    scheduler.add_request(make_request("short", 2, max_tokens=1))
    assert list(step(scheduler)[0]) == ["short"]


# --- preemption ---------------------------------------------------------------------------------------------------


def preempting_scheduler(**config):
    """Two requests of 16 tokens fill a pool of 3 blocks; both need another one in the next step."""
    scheduler = make_scheduler(num_blocks=3, **config)
    scheduler.add_request(make_request("old", 16, max_tokens=20, priority=1))
    scheduler.add_request(make_request("young", 16, max_tokens=20, priority=0))
    step(scheduler, old=1, young=2)
    return scheduler


def test_the_youngest_gives_way_and_returns_with_all_its_tokens():
    scheduler = preempting_scheduler()
    scheduler.add_request(make_request("newcomer", 1, max_tokens=9))
    scheduled = scheduler.schedule(0.0)
    assert rows_of(scheduled) == {"old": 1}
    assert scheduled.removed_request_ids == ["young"]
    assert status_of(scheduler)["young"] is RequestStatus.PREEMPTED
    assert [request.request_id for request in scheduler.waiting] == ["young", "newcomer"]
    assert scheduler.stats().num_preemptions == 1
    scheduler.update_from_output(scheduled, answer(scheduled), 0.0)
    scheduler.abort_requests(["old"])
    scheduled = scheduler.schedule(0.0)
    assert [request.request_id for request in scheduled.new_requests] == ["young", "newcomer"]
    young = scheduled.new_requests[0]
    assert young.token_ids == [*make_request("young", 16).prompt_token_ids, 2]
    assert young.num_prompt_tokens == 16
    assert scheduled.removed_request_ids == ["old"]


def test_the_victim_under_priority_is_the_lowest_however_early_it_came():
    scheduler = preempting_scheduler(policy="priority")
    scheduled = scheduler.schedule(0.0)
    assert rows_of(scheduled) == {"young": 1}
    assert scheduled.removed_request_ids == ["old"]


def test_a_request_gives_up_its_own_blocks_only_when_no_request_is_behind_it():
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add_request(make_request("a", 20, max_tokens=20))
    scheduler.add_request(make_request("b", 15, max_tokens=20))
    for _ in range(2):
        assert len(step(scheduler)[0]) == 2
    scheduled = scheduler.schedule(0.0)
    assert rows_of(scheduled) == {"a": 1}
    assert scheduled.removed_request_ids == ["b"]


def test_no_request_is_admitted_in_a_step_that_preempted():
    scheduler = preempting_scheduler()
    scheduler.add_request(make_request("tiny", 1, max_tokens=9, arrival_time_s=-1.0))
    assert step(scheduler)[0] == {"old": 1}


def test_cached_tokens_are_those_of_the_first_admission():
    manager = FakeKVCacheManager(4, 4)
    scheduler = Scheduler(SchedulerConfig(max_model_len=16), manager)
    scheduler.add_request(make_request("warm", 0, prompt=[1, 2, 3, 4, 5], max_tokens=1))
    assert step(scheduler)[1]["warm"].num_cached_tokens == 0
    scheduler.add_request(make_request("hit", 0, prompt=[1, 2, 3, 4, 6], max_tokens=3))
    rows, messages = step(scheduler)
    assert rows == {"hit": 1}
    assert messages["hit"].num_cached_tokens == 4
    assert step(scheduler)[1]["hit"].num_cached_tokens == -1


def test_cached_tokens_do_not_count_what_a_preempted_request_finds_of_its_own():
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=8)
    scheduler.add_request(make_request("old", 4, max_tokens=12))
    scheduler.add_request(make_request("young", 12, max_tokens=1))
    messages = []
    while scheduler.has_unfinished_requests():
        messages += step(scheduler)[1].values()
        if scheduler.stats().num_preemptions:
            scheduler.abort_requests(["old"])
    (young,) = [message for message in messages if message.request_id == "young"]
    assert young.num_cached_tokens == 0


# --- ends ---------------------------------------------------------------------------------------------------------


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


def test_abort_of_a_preempted_request_leaves_nothing_behind():
    scheduler = preempting_scheduler()
    step(scheduler)
    scheduler.abort_requests(["young", "old"])
    assert scheduler.stats().num_free_blocks == 3
    assert scheduler.schedule(0.0).removed_request_ids == ["old"]
    assert not scheduler.has_unfinished_requests()


# --- admission ----------------------------------------------------------------------------------------------------


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
    with pytest.raises(InvalidRequestError, match="no tokens"):
        make_scheduler().add_request(make_request("a", 0))


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


def test_an_answer_is_the_same_alone_and_in_a_crowd_that_preempts():
    def run(request_ids, num_blocks):
        runner = FakeModelRunner(num_blocks, 4)
        scheduler = make_scheduler(num_blocks, 4, max_num_batched_tokens=9, max_model_len=64)
        answers = {request_id: [] for request_id in request_ids}
        for request_id in request_ids:
            scheduler.add_request(make_request(request_id, 10, max_tokens=12))
        while scheduler.has_unfinished_requests():
            scheduled = scheduler.schedule(0.0)
            for message in scheduler.update_from_output(scheduled, runner.execute_model(scheduled), 0.0).outputs:
                answers[message.request_id] += message.new_token_ids
        return answers, scheduler.stats().num_preemptions

    crowd, num_preemptions = run("abcdef", 8)
    assert num_preemptions > 0
    assert crowd == {name: run(name, 100)[0][name] for name in "abcdef"}
    assert crowd["a"][0] == next_token(make_request("a", 10).prompt_token_ids)
