"""Who gives way when blocks are missing, and how a preempted request is scheduled again."""

from core_scheduler_helpers.steps import (
    answer,
    make_request,
    make_scheduler,
    preempting_scheduler,
    rows_of,
    status_of,
    step,
)

from llmstack_core_scheduler import RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner, next_token


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


def test_abort_of_a_preempted_request_leaves_nothing_behind():
    scheduler = preempting_scheduler()
    step(scheduler)
    scheduler.abort_requests(["young", "old"])
    assert scheduler.stats().num_free_blocks == 3
    assert scheduler.schedule(0.0).removed_request_ids == ["old"]
    assert not scheduler.has_unfinished_requests()


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
