"""Responses of the background, clients that leave, failures and drains."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from server_helpers.responses import RESPONSES, create, named_events
from server_helpers.waiting import wait_until

from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call
from llmstack_types import EngineDeadError, RequestFailedError, ServerOverloadedError


async def test_a_response_of_the_background_can_be_polled(client: openai.AsyncOpenAI, engine: FakeEngineClient):
    engine.step_delay_s = 0.01  # the answer takes many polls, also on a machine where each turn of the loop is slow
    response = await client.responses.create(model="fake", input="Hello", background=True, max_output_tokens=20)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    seen = {response.status}
    while response.status in ("queued", "in_progress"):
        response = await client.responses.retrieve(response.id)
        seen.add(response.status)
        await asyncio.sleep(0.001)
    assert seen == {"queued", "in_progress", "incomplete"}
    assert response.output_text == "HelloHelloHelloHello"
    assert response == await client.responses.cancel(response.id)


async def test_a_response_of_the_background_can_be_cancelled(
    client: openai.AsyncOpenAI, engine: FakeEngineClient, state: ServerState
):
    engine.step_delay_s = 0.005
    response = await client.responses.create(model="fake", input="Hello", background=True, max_output_tokens=100)
    await wait_until(lambda: engine.num_running)
    assert state.in_flight.count == 1
    cancelled = await client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert (await client.responses.retrieve(response.id)).status == "cancelled"
    assert len(engine.aborted_request_ids) == 1
    assert state.in_flight.count == 0


async def test_deleting_a_running_response_ends_it(client: openai.AsyncOpenAI, engine: FakeEngineClient):
    engine.step_delay_s = 0.005
    response = await client.responses.create(model="fake", input="Hello", background=True, max_output_tokens=100)
    await wait_until(lambda: engine.num_running)
    await client.responses.delete(response.id)
    assert engine.num_running == 0


async def test_a_stream_of_the_background_goes_on_without_its_client_and_can_be_read_again(
    app: Any, client: openai.AsyncOpenAI, engine: FakeEngineClient
):
    engine.step_delay_s = 0.002
    left = await call(
        app,
        "POST",
        RESPONSES,
        {"input": "Hello", "max_output_tokens": 10, "background": True, "stream": True},
        disconnect_after_parts=4,
    )
    assert named_events(left)[:3] == ["response.created", "response.queued", "response.in_progress"]
    response_id = left.body.decode().split('"id":"')[1].split('"')[0]
    again = await client.responses.retrieve(response_id, stream=True)
    events = [event async for event in again]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "HelloHello"
    assert engine.aborted_request_ids == []
    rest = await client.responses.retrieve(response_id, stream=True, starting_after=4)
    assert [event.sequence_number async for event in rest] == list(range(5, len(events)))
    for stream in ("true", "false"):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.get(
                f"/responses/{response_id}", cast_to=object,
                options={"params": {"stream": stream, "starting_after": 10**18}},
            )  # fmt: skip
        assert caught.value.param == "starting_after", "what is refused does not depend on other fields"


async def test_a_client_that_leaves_ends_its_request(app: Any, engine: FakeEngineClient):
    engine.step_delay_s = 0.002
    for stream in (False, True):
        await call(
            app,
            "POST",
            RESPONSES,
            {"input": "Hello", "max_output_tokens": 100, "stream": stream},
            disconnect_after_parts=int(stream),
        )
    assert len(engine.aborted_request_ids) == 2


async def test_a_refusal_before_the_first_token_has_its_own_status(app: Any, engine: FakeEngineClient):
    for error, status, code in (
        (ServerOverloadedError("full"), 503, "server_is_overloaded"),
        (EngineDeadError("gone"), 503, "engine_unavailable"),
        (RequestFailedError("oh"), 500, "internal_error"),
    ):
        engine.error = error
        for stream in (False, True):
            answer = await create(app, stream=stream)
            assert (answer.status, answer.json()["error"]["code"]) == (status, code)


async def test_a_failure_after_the_first_token_is_the_last_event(app: Any, engine: FakeEngineClient):
    engine.error, engine.num_tokens_before_error = RequestFailedError("oh"), 3
    answer = await create(app, stream=True)
    assert answer.status == 200
    assert named_events(answer)[-1] == "response.failed"
    assert b"[DONE]" not in answer.body
    failed = answer.body.decode().split("data: ")[-1]
    assert '"status":"failed"' in failed
    assert '"text":"Hel"' in failed


async def test_a_failure_in_the_background_is_in_the_retrieved_response(
    app: Any, engine: FakeEngineClient, client: openai.AsyncOpenAI
):
    engine.error, engine.num_tokens_before_error = RequestFailedError("oh"), 3
    response = await client.responses.create(model="fake", input="Hello", background=True, max_output_tokens=9)
    while response.status in ("queued", "in_progress"):
        response = await client.responses.retrieve(response.id)
        await asyncio.sleep(0)
    assert response.status == "failed"
    assert response.error is not None
    assert (response.error.code, response.error.message) == ("server_error", "Internal error")


async def test_a_drain_waits_for_the_background_and_the_cut_ends_it(
    app: Any, engine: FakeEngineClient, state: ServerState, client: openai.AsyncOpenAI
):
    engine.step_delay_s = 0.005
    response = await client.responses.create(model="fake", input="Hello", background=True, max_output_tokens=100)
    await wait_until(lambda: engine.num_running)
    assert not await state.in_flight.wait_until_idle(0.01)
    state.in_flight.cut()
    assert await state.in_flight.wait_until_idle(5)
    assert engine.num_running == 0
    found = await client.responses.retrieve(response.id)
    assert (found.status, found.error and found.error.message) == ("failed", "The server is shutting down.")


async def test_what_is_stored_can_be_asked_for_while_the_server_drains(app: Any, state: ServerState):
    response = (await create(app)).json()
    state.lifecycle.advance(LifecycleState.DRAINING)
    assert (await call(app, "GET", f"{RESPONSES}/{response['id']}")).json() == response
    assert (await create(app)).json()["error"]["code"] == "server_shutting_down"
