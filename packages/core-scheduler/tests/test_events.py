"""The event hook receives each state that a request enters, in order."""

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
    received: list[tuple[str, str]] = []
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=64),
        FakeKVCacheManager(8, 16),
        on_status=lambda request_id, status: received.append((request_id, status.name)),
    )
    scheduler.add_request(EngineCoreRequest("r", [1, 2], SamplingParams(max_tokens=5), eos_token_ids=(END,)))
    run_to_the_end(scheduler, END)
    assert received == [("r", "WAITING"), ("r", "RUNNING"), ("r", "FINISHED_STOPPED")]


def test_the_listener_receives_the_states_of_preempted_and_aborted_requests() -> None:
    received: dict[str, list[RequestStatus]] = {"old": [], "young": [], "gone": []}
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=64),
        FakeKVCacheManager(4, 4),
        on_status=lambda request_id, status: received[request_id].append(status),
    )
    for name in received:
        scheduler.add_request(EngineCoreRequest(name, [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=8)))
    scheduler.abort_requests(["gone"])
    run_to_the_end(scheduler, 7)
    waiting, running, capped = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED_LENGTH_CAPPED
    assert received["old"] == [waiting, running, capped]
    *lives, end = received["young"]  # preempted once or more, and running again after each time
    num_preemptions = lives.count(RequestStatus.PREEMPTED)
    assert num_preemptions > 0
    assert lives == [waiting, running, *[RequestStatus.PREEMPTED, running] * num_preemptions]
    assert end is capped
    assert received["gone"] == [waiting, RequestStatus.FINISHED_ABORTED]
