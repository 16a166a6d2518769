"""`GET /steps` shows what the engine core keeps of its last steps."""

from __future__ import annotations

import pytest
from engine_core_helpers.steps import step_record

from llmstack_server.app import build_app
from llmstack_server.app.steps import parse_number, step_log_object
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_types import (
    InvalidRequestError,
    RequestEvent,
    RequestStatus,
    ScheduledRequest,
    StepRecord,
    StepRecording,
)


def record(step: int) -> StepRecord:
    row = ScheduledRequest("r", 3, 2, [5], [9])
    phases_s = (0.001, 0.02, 0.003)
    return step_record(step, [row], 10.0 + step, phases_s, num_running=1, num_free_blocks=7, num_blocks=8)


STEP_LOG = StepRecording(20.0, [record(1), record(2)], [RequestEvent("r", RequestStatus.RUNNING, 19.5)])


def test_times_are_those_of_the_day() -> None:
    shown = step_log_object(STEP_LOG, now=1000.0)
    assert shown["now"] == 1000.0
    assert [step["time"] for step in shown["steps"]] == [991.0, 992.0]
    assert shown["events"] == [{"time": 999.5, "id": "r", "status": "RUNNING"}]


def test_a_step_shows_its_batch_blocks_and_phases() -> None:
    step = step_log_object(STEP_LOG, now=0.0)["steps"][0]
    assert step["requests"] == [
        {"id": "r", "num_computed_tokens": 3, "num_scheduled_tokens": 2, "num_draft_tokens": 1, "new_block_ids": [5]}
    ]
    assert (step["num_free_blocks"], step["num_blocks"], step["num_running"]) == (7, 8, 1)
    assert (step["schedule_ms"], step["execute_ms"], step["update_ms"]) == (1.0, 20.0, 3.0)


async def test_steps_are_read_from_a_number_on() -> None:
    engine = FakeEngineClient()
    engine.last_steps = STEP_LOG
    app = build_app(ready_state(engine))
    answer = await call(app, "GET", "/steps")
    assert [step["step"] for step in answer.json()["steps"]] == [1, 2]


@pytest.mark.parametrize("text", ["-1", "x", "1e3", "9" * 40, "٣"])
def test_what_is_no_number_of_a_step_names_the_parameter(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_number("after", {"after": text})
    assert caught.value.param == "after"


async def test_an_engine_core_that_is_not_there_names_the_parameter() -> None:
    assert parse_number("engine", {"engine": "1"}, max_number=1) == 1
    with pytest.raises(InvalidRequestError) as caught:
        parse_number("engine", {"engine": "2"}, max_number=1)
    assert caught.value.param == "engine"


@pytest.mark.parametrize(
    ("query", "steps", "gap"),
    [
        ("after=5", [6, 8], None),
        ("after=7", [8], None),  # a step without rows is not kept
        ("after=8", [], None),
        ("after=2", [5, 6, 8], {"reason": "steps_forgotten", "after": 2, "next": 5}),
        ("after=40", [5, 6, 8], {"reason": "engine_core_replaced", "after": 40, "next": 5}),
        ("after=6&core=another", [5, 6, 8], {"reason": "engine_core_replaced", "after": 6, "next": 5}),
    ],
)
async def test_a_gap_after_the_step_that_was_asked_for_is_said(query: str, steps: list[int], gap: object) -> None:
    engine = FakeEngineClient()
    engine.last_steps = StepRecording(20.0, [record(5), record(6), record(8)], [])
    app = build_app(ready_state(engine))
    answer = (await call(app, "GET", f"/steps?{query}")).json()
    assert ([step["step"] for step in answer["steps"]], answer["gap"]) == (steps, gap)
    same = (await call(app, "GET", f"/steps?after=8&core={answer['core']}")).json()
    assert (same["steps"], same["gap"]) == ([], None)


async def test_the_log_is_a_file_for_operators_where_one_is_kept() -> None:
    engine = FakeEngineClient()
    app = build_app(ready_state(engine))
    answer = await call(app, "GET", "/steps/log")
    assert (answer.status, answer.json()["error"]["code"]) == (404, "not_found")
    engine.last_steps = STEP_LOG
    answer = await call(app, "GET", "/steps/log")
    assert (answer.status, answer.body) == (200, b"llmsteps")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert (await call(app, "GET", "/steps/log?engine=1")).status == 400
    app = build_app(ready_state(engine, HTTPConfig(api_keys=(Secret("k"), Secret("l")))))
    assert (await call(app, "GET", "/steps/log", headers={"authorization": "Bearer k"})).status == 403


async def test_the_route_is_behind_the_key() -> None:
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(api_keys=(Secret("k"),))))
    assert (await call(app, "GET", "/steps")).status == 401
    assert (await call(app, "GET", "/steps", headers={"authorization": "Bearer k"})).status == 200
