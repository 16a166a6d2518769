"""One behaviour at a time: running, waiting, preemption, and the messages of a step."""

from core_scheduler_helpers.steps import (
    make_request,
    make_scheduler,
    rows_of,
    status_of,
    step,
)

from llmstack_core_scheduler import RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager

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


def test_prompts_share_a_step_up_to_a_number_of_tokens():
    scheduler = make_scheduler(max_num_batched_tokens=100, max_prefill_tokens=20, max_model_len=200)
    for name, length in (("first", 12), ("second", 8), ("third", 1), ("fourth", 5)):
        scheduler.add_request(make_request(name, length))
    assert step(scheduler)[0] == {"first": 12, "second": 8, "third": 1}
    assert step(scheduler)[0] == {"first": 1, "second": 1, "third": 1, "fourth": 5}


def test_a_longer_prompt_than_several_may_have_is_computed_alone_and_whole():
    scheduler = make_scheduler(max_num_batched_tokens=100, max_prefill_tokens=20, max_model_len=200)
    for name, length in (("short", 5), ("long", 50), ("last", 5)):
        scheduler.add_request(make_request(name, length))
    assert step(scheduler)[0] == {"short": 5}
    assert step(scheduler)[0] == {"short": 1, "long": 50}  # a decode is no prompt
    assert step(scheduler)[0] == {"short": 1, "long": 1, "last": 5}


def test_the_rest_of_a_long_prompt_counts_with_those_that_would_join():
    scheduler = make_scheduler(max_num_batched_tokens=16, max_prefill_tokens=8, max_model_len=200)
    scheduler.add_request(make_request("long", 20))
    scheduler.add_request(make_request("short", 7))
    assert step(scheduler)[0] == {"long": 16}
    assert step(scheduler)[0] == {"long": 4}
    assert step(scheduler)[0] == {"long": 1, "short": 7}


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
