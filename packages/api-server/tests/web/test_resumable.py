"""Requests whose answers outlive their connections: retries join, lost streams go on."""

from __future__ import annotations

import asyncio
import json
import random
import re
from contextlib import aclosing
from typing import Any

import httpx2
import openai
import pytest
from server_helpers.waiting import wait_until

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.state.server_state import ServerState
from llmstack_server.state.stream_table import MAX_PER_OWNER
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_server.web import resumable
from llmstack_types import NumericalError

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
COMPLETION: dict[str, Any] = {"prompt": "Hello", "max_tokens": 20}
KEY = {"Idempotency-Key": "mine"}
EVENT = re.compile(rb"id: ([0-9a-f]{32})\.([0-9]+)\ndata: ([^\n]*)\n\n")


class HeldEngine(FakeEngineClient):
    """Generates nothing beyond its first tokens until `gate` is set."""

    def __init__(self, num_free_tokens: int = 0) -> None:
        super().__init__()
        self.num_free_tokens = num_free_tokens
        self.num_held = 0
        self.gate = asyncio.Event()

    async def _outputs(self, *arguments: Any) -> Any:
        num_tokens = 0
        async with aclosing(super()._outputs(*arguments)) as outputs:
            async for output in outputs:
                if num_tokens >= self.num_free_tokens:
                    self.num_held += 1
                    await self.gate.wait()
                num_tokens += 1
                yield output


def server(engine: FakeEngineClient | None = None, **options: Any) -> tuple[Any, ServerState]:
    state = ready_state(engine or FakeEngineClient(), HTTPConfig(**options))
    return build_app(state), state


async def let_it_send(engine: HeldEngine) -> None:
    """Returns when the engine is held and all that it has generated was sent."""
    await wait_until(lambda: engine.num_held)
    for _ in range(100):  # all that remains is on this event loop
        await asyncio.sleep(0)


async def post(app: Any, body: Any, headers: Any = KEY, path: str = CHATS, **options: Any) -> Answer:
    return await call(app, "POST", path, body, headers, **options)


def code_of(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json()["error"]["code"]


def outcomes(state: ServerState) -> dict[str, int]:
    found = re.findall(rb'llmstack:resumable_streams_total\{.*outcome="(\w+)"\} (\d+)', state.metrics.render())
    return {name.decode(): int(value) for name, value in found if int(value)}


def text_of(events: list[bytes], path: str) -> str:
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(one["text"] if path == COMPLETIONS else one["delta"].get("content", "") for one in choices)


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, COMPLETION)])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_retry_gets_the_finished_answer_without_double_work(path: str, body: Any, is_stream: bool):
    app, state = server()
    body = body | {"stream": is_stream}
    first, second = [await post(app, body, path=path) for _ in range(2)]
    assert (first.status, second.status) == (200, 200)
    assert first.body == second.body
    assert first.headers["x-llmstack-resumable"] == "true"
    assert len(state.engine.admitted) == 1
    assert outcomes(state) == {"started": 1, "joined": 1}
    plain = await post(app, body, {}, path)
    if is_stream:
        ids = [match[1] for match in EVENT.findall(first.body)]
        assert ids == [b"%d" % number for number in range(1, len(ids) + 1)]
        assert b"".join(b"data: %b\n\n" % match[2] for match in EVENT.findall(first.body))[-14:] == plain.body[-14:]
        assert b"id: " not in plain.body
    assert "x-llmstack-resumable" not in plain.headers


async def test_a_retry_joins_the_running_answer_whose_first_client_has_left():
    engine = HeldEngine()
    app, state = server(engine)
    first = asyncio.create_task(post(app, CHAT))
    await wait_until(lambda: engine.num_running)
    left = await post(app, CHAT, disconnect_after_parts=0)
    assert left.status == 0
    joined = asyncio.create_task(post(app, CHAT))
    await wait_until(lambda: outcomes(state) == {"started": 1, "joined": 2})
    engine.gate.set()
    answers = await asyncio.gather(first, joined)  # whole answers may have several readers
    assert answers[0].body == answers[1].body
    assert answers[0].json()["choices"][0]["message"]["content"] == "Hello" * 4
    assert len(engine.admitted) == 1
    assert not engine.aborted_request_ids


async def test_another_body_route_or_key_is_no_retry():
    app, state = server(api_keys=(Secret("a"), Secret("b")))
    alice, bob = ({"Authorization": f"Bearer {name}", **KEY} for name in "ab")
    assert (await post(app, CHAT, alice)).status == 200
    for answer in (
        await post(app, CHAT | {"max_tokens": 3}, alice),
        await post(app, CHAT, alice, COMPLETIONS),
    ):
        assert code_of(answer) == (400, "idempotency_key_reused")
        assert answer.headers["x-should-retry"] == "false"
    assert (await post(app, CHAT | {"max_tokens": 3}, bob)).status == 200
    assert len(state.engine.admitted) == 2


async def test_unknown_foreign_and_malformed_ids_look_alike():
    app, _ = server(api_keys=(Secret("a"), Secret("b")))
    alice, bob = ({"Authorization": f"Bearer {name}"} for name in "ab")
    body = CHAT | {"stream": True}
    first = await post(app, body, alice | {"x-llmstack-resume": "5"})
    stream_id = first.headers["x-llmstack-stream-id"]
    own = await call(app, "GET", f"/v1/streams/{stream_id}", headers=alice)
    assert own.body == first.body
    refused = [
        await call(app, "GET", f"/v1/streams/{stream_id}", headers=bob),
        await call(app, "GET", f"/v1/streams/{stream_id}?after=999", headers=alice),
        await call(app, "GET", f"/v1/streams/{'0' * 32}", headers=alice),
        await call(app, "GET", "/v1/streams/x", headers=alice),
        await post(app, body, bob | {"Last-Event-ID": f"{stream_id}.1"}),
        await post(app, body, alice | {"Last-Event-ID": "x"}),
        await post(app, body | {"max_tokens": 3}, alice | {"Last-Event-ID": f"{stream_id}.1"}),
    ]
    assert {(answer.status, answer.body) for answer in refused} == {(404, refused[0].body)}
    assert code_of(refused[0]) == (404, "not_found")


@pytest.mark.parametrize(
    "headers",
    [{"Idempotency-Key": key} for key in ("", "x" * 256, "é", "a\tb", "a\x7f")]
    + [{"x-llmstack-resume": value} for value in ("", "0", "61", "x", "9" * 5000)],
)
async def test_headers_out_of_range_are_refused(headers: dict[str, str]):
    app, _ = server()
    assert code_of(await post(app, CHAT, headers)) == (400, "invalid_value")
    assert (await post(app, CHAT, {"Idempotency-Key": "x" * 255, "x-llmstack-resume": "60"})).status == 200


async def test_an_error_before_the_first_token_is_not_remembered():
    engine = FakeEngineClient()
    app, state = server(engine)
    assert code_of(await post(app, CHAT | {"temperature": -1})) == (400, "decimal_below_min_value")
    for is_stream in (False, True):
        engine.error = NumericalError()
        assert code_of(await post(app, CHAT | {"stream": is_stream})) == (500, "numerical_error")
        engine.error = None
        assert (await post(app, CHAT | {"stream": is_stream}, {"Idempotency-Key": str(is_stream)})).status == 200
    assert outcomes(state) == {"started": 5}


async def test_a_second_reader_replaces_the_first_which_ends_with_an_error():
    engine = HeldEngine(num_free_tokens=2)
    app, _ = server(engine)
    body = CHAT | {"stream": True}
    first = asyncio.create_task(post(app, body))
    await let_it_send(engine)
    second = asyncio.create_task(post(app, body))
    taken = await first
    assert json.loads(taken.body.split(b"data: ")[-1])["error"]["code"] == "stream_reader_replaced"
    assert b"[DONE]" not in taken.body
    engine.gate.set()
    events = [match[2] for match in EVENT.findall((await second).body)]
    assert text_of(events, CHATS) == "Hello" * 4
    assert events[-1] == b"[DONE]"


async def test_a_replaced_reader_of_a_response_gets_an_event_of_its_form():
    engine = HeldEngine(num_free_tokens=2)
    app, _ = server(engine)
    body, path = {"input": "Hello", "max_output_tokens": 20, "stream": True, "store": False}, "/v1/responses"
    first = asyncio.create_task(post(app, body, path=path))
    await let_it_send(engine)
    second = asyncio.create_task(post(app, body, path=path))
    taken = await first
    *events, last = [json.loads(part.partition(b"data: ")[2]) for part in taken.body.split(b"\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert len(events) > 2
    assert taken.body.split(b"\n\n")[-2].startswith(b"event: error\n")
    message = "Another connection reads this stream now."
    code = "stream_reader_replaced"
    assert last == {"type": "error", "sequence_number": len(events), "code": code, "message": message, "param": None}
    engine.gate.set()
    assert b"event: response.incomplete\n" in (await second).body


@pytest.mark.parametrize("seed", range(4))
async def test_events_come_in_order_over_a_connection_that_stops_at_random(seed: int):
    app, _ = server()
    body = CHAT | {"stream": True, "max_tokens": 60}
    drawn = random.Random(seed)
    first = await post(app, body, has_room=lambda: drawn.random() < 0.6)
    found = EVENT.findall(first.body)
    assert [int(number) for _, number, _ in found] == list(range(1, len(found) + 1))
    assert found[-1][2] == b"[DONE]"
    assert b"".join(b"id: %b.%b\ndata: %b\n\n" % event for event in found) == first.body
    assert len(first.parts) > 4
    assert (await post(app, body)).body == first.body


async def test_only_requests_with_the_headers_outlive_their_connection():
    engine = HeldEngine(num_free_tokens=2)
    app, state = server(engine)
    body = CHAT | {"stream": True}
    await post(app, body, {}, disconnect_after_parts=1)
    await wait_until(lambda: len(engine.aborted_request_ids) == 1)
    left = await post(app, body, {"x-llmstack-resume": "60"}, disconnect_after_parts=1)
    assert (engine.num_running, len(engine.aborted_request_ids)) == (1, 1)
    assert state.in_flight.count == 1  # a drain waits for it
    engine.gate.set()
    rest = await call(app, "GET", f"/v1/streams/{left.headers['x-llmstack-stream-id']}?after=1")
    assert text_of([match[2] for match in EVENT.findall(rest.body)], CHATS) == "Hello" * 4


async def test_an_answer_without_a_reader_in_time_is_aborted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resumable, "MAX_KEEP_S", 0.02)
    engine = HeldEngine(num_free_tokens=1)
    app, state = server(engine)
    await post(app, CHAT | {"stream": True}, disconnect_after_parts=1)
    await wait_until(lambda: engine.aborted_request_ids)
    await wait_until(lambda: not state.in_flight.count)
    assert outcomes(state) == {"started": 1, "abandoned": 1}
    engine.gate.set()
    assert (await post(app, CHAT)).status == 200


async def test_beyond_the_limits_a_request_is_answered_but_ends_with_its_connection():
    engine = HeldEngine(num_free_tokens=1)
    app, state = server(engine)
    for number in range(MAX_PER_OWNER):
        await post(app, CHAT | {"stream": True}, {"Idempotency-Key": str(number)}, disconnect_after_parts=1)
    refused = await post(app, CHAT | {"stream": True}, {"Idempotency-Key": "more"}, disconnect_after_parts=1)
    assert refused.headers["x-llmstack-resumable"] == "false"
    assert "x-llmstack-stream-id" not in refused.headers
    await wait_until(lambda: len(engine.aborted_request_ids) == 1)
    assert outcomes(state) == {"started": MAX_PER_OWNER, "refused": 1}
    state.in_flight.cut()
    await wait_until(lambda: not state.in_flight.count)


async def test_a_server_that_ends_tells_the_reader():
    engine = HeldEngine(num_free_tokens=1)
    app, state = server(engine)
    reading = asyncio.create_task(post(app, CHAT | {"stream": True}))
    await let_it_send(engine)
    state.in_flight.cut()
    assert b"server_shutting_down" in (await reading).body
    await wait_until(lambda: not state.in_flight.count)
    for end in state.at_end:
        await end()


async def test_messages_are_joined_and_end_in_their_own_form():
    engine = HeldEngine(num_free_tokens=2)
    app, _ = server(engine)
    body = CHAT | {"stream": True, "model": "fake"}
    first = asyncio.create_task(post(app, body, path="/v1/messages"))
    await let_it_send(engine)
    second = asyncio.create_task(post(app, body, path="/v1/messages"))
    lines = (await first).body.decode().splitlines()
    assert lines[-3] == "event: error"
    error = json.loads(lines[-2].removeprefix("data: "))
    assert (error["type"], error["error"]["message"]) == ("error", "Another connection reads this stream now.")
    engine.gate.set()
    assert re.findall(r"^event: (\w+)", (await second).body.decode(), re.MULTILINE)[-1] == "message_stop"
    reused = await post(app, body | {"max_tokens": 3}, path="/v1/messages")
    assert (reused.status, reused.json()["type"]) == (400, "error")
    assert len(engine.admitted) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_responses_are_joined_and_resumed(is_stream: bool):
    app, state = server()
    body = {"input": "Hello", "max_output_tokens": 20, "stream": is_stream}
    first, second = [await post(app, body, path="/v1/responses") for _ in range(2)]
    assert (first.status, first.body) == (200, second.body)
    assert len(state.engine.admitted) == 1
    if is_stream:
        rest = await call(app, "GET", f"/v1/streams/{first.headers['x-llmstack-stream-id']}?after=4")
        assert rest.body == first.body[first.body.index(b".5\n") - 36 :]
        assert re.findall(rb"^event: ([a-z._]+)", rest.body, re.MULTILINE)[-1] == b"response.incomplete"


async def test_a_response_that_fails_is_not_remembered():
    engine = FakeEngineClient()
    app, _ = server(engine)
    body = {"input": "Hello", "stream": True, "max_output_tokens": 20}
    engine.error, engine.num_tokens_before_error = NumericalError(), 2
    assert b"event: response.failed" in (await post(app, body, path="/v1/responses")).body
    engine.error = None
    again = await post(app, body, path="/v1/responses")
    assert b"event: response.incomplete" in again.body
    assert len(engine.admitted) == 2


async def test_the_official_client_retries_and_streams_with_a_key():
    app, state = server()
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        texts = []
        for _ in range(2):
            stream = await client.completions.create(
                model="fake", prompt="Hello", max_tokens=20, stream=True, extra_headers=KEY
            )
            texts.append("".join([chunk.choices[0].text async for chunk in stream]))
    assert texts == ["Hello" * 4] * 2
    assert len(state.engine.admitted) == 1


async def cut_until_the_end(app: Any, drawn: random.Random, path: str, body: Any, number: int) -> tuple[str, int]:
    """Reads a stream over connections that are lost after random bytes; its text, and the number of connections."""
    events: list[bytes] = []
    last_id, num_connections = b"", 0
    headers = {"Idempotency-Key": f"cut-{number}"}
    while not events or events[-1] != b"[DONE]":
        num_connections += 1
        limit = drawn.randrange(1, 1500)
        if last_id and drawn.random() < 0.5:
            stream_id, _, after = last_id.decode().partition(".")
            answer = await call(app, "GET", f"/v1/streams/{stream_id}?after={after}", disconnect_after_bytes=limit)
        else:
            resume = {"Last-Event-ID": last_id.decode()} if last_id else {}
            answer = await post(app, body, headers | resume, path, disconnect_after_bytes=limit)
        for stream_id, after, data in EVENT.findall(answer.body):
            assert int(after) == len(events) + 1
            events.append(data)
            last_id = stream_id + b"." + after
    return text_of(events, path), num_connections


@pytest.mark.parametrize("num_cuts", [30, pytest.param(1000, marks=pytest.mark.full)])
async def test_a_stream_that_is_cut_at_any_byte_ends_with_the_exact_text(num_cuts: int):
    drawn = random.Random(num_cuts)
    app, state = server()
    done = number = 0
    while done < num_cuts:
        path, body = drawn.choice([(CHATS, CHAT), (COMPLETIONS, COMPLETION)])
        text, num_connections = await cut_until_the_end(app, drawn, path, body | {"stream": True}, number)
        assert text == "Hello" * 4
        done += num_connections - 1
        number += 1
    assert len(state.engine.admitted) == number
    assert not state.engine.aborted_request_ids


async def test_an_answer_that_is_deleted_ends_and_is_not_found_again():
    app, state = server(engine := HeldEngine(num_free_tokens=3), api_keys=(Secret("first"), Secret("second")))
    first, second = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))
    answering = asyncio.create_task(post(app, {**CHAT, "stream": True}, {**first, "x-llmstack-resume": "60"}))
    await let_it_send(engine)
    (stream_id,) = state.streams.table._id_to_record
    path = f"/v1/streams/{stream_id}"
    assert code_of(await call(app, "DELETE", path, headers=second)) == (404, "not_found")
    assert (await call(app, "DELETE", path, headers=first)).status == 200
    answering.cancel()  # the client leaves
    await wait_until(lambda: engine.aborted_request_ids)
    for method in ("DELETE", "GET"):
        assert code_of(await call(app, method, path, headers=first)) == (404, "not_found")
