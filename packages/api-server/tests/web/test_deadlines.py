"""A request that takes too long ends with 504, or with an error in its stream; the engine aborts it."""

from __future__ import annotations

from typing import Any

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Hello", "max_tokens": 40}


def timed(engine: FakeEngineClient, timeout_s: float) -> Any:
    return build_app(ready_state(engine, HTTPConfig(request_timeout_s=timeout_s)))


async def test_what_is_late_ends_with_504_and_is_aborted() -> None:
    engine = FakeEngineClient()
    engine.step_delay_s = 0.05
    answer = await call(timed(engine, 0.2), "POST", COMPLETIONS, LONG)
    error = answer.json()["error"]
    assert (answer.status, error["type"], error["code"]) == (504, "server_error", "deadline_exceeded")
    assert error["message"] == "The request was not done after 0.2 seconds."
    assert len(engine.aborted_request_ids) == 1


async def test_a_stream_that_is_late_ends_with_an_error_and_without_done() -> None:
    engine = FakeEngineClient()
    engine.step_delay_s = 0.05
    answer = await call(timed(engine, 0.3), "POST", COMPLETIONS, {**LONG, "stream": True})
    assert answer.status == 200
    events = answer.events()
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert len(events) > 1
    assert b"[DONE]" not in answer.body
    assert len(engine.aborted_request_ids) == 1


async def test_a_vector_has_to_be_in_time_too() -> None:
    engine = FakeEngineClient()
    answer = await call(timed(engine, 30.0), "POST", "/v1/embeddings", {"input": "Hello"})
    assert answer.status == 200
