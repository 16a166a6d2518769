"""The event hook hears each state a request enters, in order."""

from llmstack_core_scheduler import RequestStatus, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams

END = 9


def run_to_the_end(scheduler: Scheduler, token_id: int) -> None:
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule(0.0)
        rows = [row.request_id for row in step.scheduled_requests]
        scheduler.update_from_output(step, ModelRunnerOutput(rows, [[token_id] for _ in rows]), 0.0)


def test_a_request_waits_runs_and_stops() -> None:
    heard: list[tuple[str, str]] = []
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=64),
        FakeKVCacheManager(8, 16),
        on_status=lambda request_id, status: heard.append((request_id, status.name)),
    )
    scheduler.add_request(EngineCoreRequest("r", [1, 2], SamplingParams(max_tokens=5), eos_token_ids=(END,)))
    run_to_the_end(scheduler, END)
    assert heard == [("r", "WAITING"), ("r", "RUNNING"), ("r", "FINISHED_STOPPED")]


def test_a_preempted_request_is_heard_to_come_back_and_an_aborted_one_to_end() -> None:
    heard: dict[str, list[RequestStatus]] = {"old": [], "young": [], "gone": []}
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=64),
        FakeKVCacheManager(4, 4),
        on_status=lambda request_id, status: heard[request_id].append(status),
    )
    for name in heard:
        scheduler.add_request(EngineCoreRequest(name, [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=8)))
    scheduler.abort_requests(["gone"])
    run_to_the_end(scheduler, 7)
    waiting, running, capped = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED_LENGTH_CAPPED
    assert heard["old"] == [waiting, running, capped]
    *lives, end = heard["young"]  # preempted once or more, and running again after each time
    num_preemptions = lives.count(RequestStatus.PREEMPTED)
    assert num_preemptions > 0
    assert lives == [waiting, running, *[RequestStatus.PREEMPTED, running] * num_preemptions]
    assert end is capped
    assert heard["gone"] == [waiting, RequestStatus.FINISHED_ABORTED]
