"""Steps of a scheduler without a model: equal calls give equal steps, and a scheduler that gets stuck is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_step_log.control_plane import CacheConfig, build_scheduler
from llmstack_step_log.decisions import pack_scheduled, pack_updated
from llmstack_step_log.replay.driver import MAX_IDLE_STEPS, NoProgressError, SchedulerDriver
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)

LIMITS = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
CACHE = CacheConfig(16, 4)


def make() -> SchedulerDriver:
    return SchedulerDriver(build_scheduler(LIMITS, CACHE), now_s=5.0)


def request(name: str, num_tokens: int = 6, max_tokens: int = 3, **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    return EngineCoreRequest(name, list(range(num_tokens)), params, **fields)


class Tokens:
    """Samples 7 where a prompt is computed."""

    def __init__(self, num_tokens: dict[str, int]) -> None:
        self.num_tokens = num_tokens

    def sample(self, rows: Sequence[ScheduledRequest]) -> list[list[int]]:
        return [
            [7] if row.num_computed_tokens + row.num_scheduled_tokens >= self.num_tokens[row.request_id] else []
            for row in rows
        ]


def a_second_each(rows: Sequence[ScheduledRequest]) -> float:
    return float(len(rows))


def run(driver: SchedulerDriver, tokens: Tokens) -> list[tuple[bytes, bytes, float]]:
    steps = []
    while driver.scheduler.has_unfinished_requests():
        scheduled, outputs = driver.step(tokens.sample, a_second_each)
        steps.append((pack_scheduled(scheduled), pack_updated(outputs), driver.now_s))
    return steps


def test_each_step_takes_what_its_rows_take_and_one_without_rows_takes_nothing() -> None:
    driver = make()
    assert driver.add(request("a", 20))
    assert driver.add(request("b", 4))
    steps = run(driver, Tokens({"a": 20, "b": 4}))
    # The first chunk of `a`; its end and `b`; two decodes each, of which the last ends it; the removal of the rows.
    assert [now_s for *_, now_s in steps] == [6.0, 8.0, 10.0, 12.0, 12.0]
    assert (driver.num_steps, driver.under_way) == (5, {})


def test_equal_calls_give_equal_steps() -> None:
    one, other = make(), make()
    for driver in (one, other):
        for number in range(6):
            driver.add(request(f"r{number}", 3 + 5 * number, 1 + number))
    tokens = Tokens({f"r{number}": 3 + 5 * number for number in range(6)})
    assert run(one, tokens) == run(other, tokens)


def test_what_the_scheduler_refuses_is_said_and_changes_nothing() -> None:
    driver = make()
    assert not driver.add(request("long", 65))
    assert driver.fork("unknown", request("child")) is None
    assert not driver.scheduler.has_unfinished_requests()


def test_a_fork_says_what_it_need_not_compute() -> None:
    driver = make()
    driver.add(request("a", 6, max_tokens=8))
    driver.step(Tokens({"a": 6}).sample, a_second_each)
    child = replace(request("b", 6), prompt_token_ids=[*range(6), 7, 8])
    assert driver.fork("a", child) == 6


def test_steps_under_way_end_in_their_order_with_times_of_the_caller() -> None:
    driver = make()
    driver.add(request("a", 4))
    driver.add(request("b", 4))
    first = driver.schedule(10.0)
    second = driver.schedule(11.0)
    assert list(driver.under_way) == [first.step, second.step] == [1, 2]
    with pytest.raises(ValueError, match="not the first"):
        driver.update(second.step, [[7], [7]], 12.0)
    driver = SchedulerDriver(driver.scheduler, 11.0, 2, {1: first, 2: second})
    outputs = driver.update(first.step, [[7], []], 12.0, {"b": "made to fail"})
    assert [(one.request_id, one.finish_reason) for one in outputs.outputs] == [("a", None), ("b", FinishReason.ERROR)]
    assert (driver.now_s, list(driver.under_way)) == (12.0, [second.step])
    with pytest.raises(KeyError):
        driver.update(first.step, [[7], [7]], 13.0)


class StuckScheduler:
    """Has a request for ever, and schedules it never, or only sometimes."""

    def __init__(self, rests: int = 1 << 30) -> None:
        self.rests = rests
        self.step = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        """It is kept for ever."""

    def has_unfinished_requests(self) -> bool:
        return True

    def schedule(self, now_s: float) -> SchedulerOutput:
        self.step += 1
        rows = [] if self.step % (self.rests + 1) else [ScheduledRequest("r", 0, 1, [])]
        return SchedulerOutput(self.step, [], rows, [], len(rows))

    def update_from_output(self, scheduled: Any, output: ModelRunnerOutput, now_s: float) -> EngineCoreOutputs:
        return EngineCoreOutputs([], now_s)


def test_a_scheduler_that_never_schedules_is_noticed() -> None:
    driver = SchedulerDriver(StuckScheduler(), 5.0)  # type: ignore[arg-type]  # it has what is called of one
    for _ in range(MAX_IDLE_STEPS):
        driver.step(Tokens({}).sample, a_second_each)
    with pytest.raises(NoProgressError, match=r"no progress at 5\.000 s"):
        driver.step(Tokens({}).sample, a_second_each)


def test_a_scheduler_that_rests_for_as_long_as_it_may_makes_progress() -> None:
    driver = SchedulerDriver(StuckScheduler(MAX_IDLE_STEPS))  # type: ignore[arg-type]  # it has what is called of one
    for _ in range(3 * MAX_IDLE_STEPS):
        driver.step(Tokens({"r": 1}).sample, a_second_each)
    assert driver.now_s == 2.0
