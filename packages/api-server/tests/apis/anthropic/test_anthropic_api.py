"""`/v1/messages` over the fake engine: through the official client, and its errors for every cause."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.app import build_app
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_types import EngineDeadError, RequestFailedError, ServerOverloadedError

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Hello"}]
BODY = {"model": "fake", "messages": HELLO, "max_tokens": 7}


def new_app() -> Any:
    return build_app(ready_state(FakeEngineClient()))


# Applications that several tests or examples share: building one takes a while. Those that generate belong to one loop.
any_app = pytest.fixture(scope="module")(new_app)
generating_app = pytest.fixture(scope="module")(new_app)


def client_of(app: Any, **options: Any) -> Any:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    return anthropic.AsyncAnthropic(base_url="http://localhost", http_client=http, max_retries=0, **options)


@pytest.fixture
async def client(app: Any) -> AsyncIterator[Any]:
    async with client_of(app, api_key="none") as made:
        yield made


async def post(app: Any, path: str = MESSAGES, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    body = {**BODY, **fields}
    return await call(app, "POST", path, {name: value for name, value in body.items() if value is not None}, headers)


async def test_the_client_gets_a_message(client: Any):
    message = await client.messages.create(**BODY, system="Hi", metadata={"user_id": "me"})
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hi\nHell"}]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (8, 7)
    assert (message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens) == (0, 0)
    assert message._request_id is not None


async def test_the_client_streams_what_the_whole_answer_says(client: Any):
    whole = await client.messages.create(**BODY)
    async with client.messages.stream(**BODY) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert [kind for kind in dict.fromkeys(kinds) if kind != "text"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens


@given(st.text("ab c", min_size=1, max_size=12), st.integers(1, 20), st.floats(0.01, 1))
async def test_any_message_says_the_same_streamed_and_whole(
    generating_app: Any, text: str, max_tokens: int, top_p: float
):
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "top_p": top_p}
    whole = (await post(generating_app, **fields)).json()
    anthropic.types.Message.model_validate(whole)
    answer = await post(generating_app, **fields, stream=True)
    snapshot, buffers = None, {}
    for line in answer.body.decode().splitlines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    streamed = json.loads(snapshot.model_dump_json(exclude_none=True)) | {"id": whole["id"]}
    assert streamed == {name: value for name, value in whole.items() if value is not None}


async def test_tokens_are_counted_as_they_are_read(client: Any):
    counted = await client.messages.count_tokens(model="fake", messages=HELLO, system="Be brief.")
    message = await client.messages.create(**BODY, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens == 15


async def test_stop_sequences_and_sampling_reach_the_engine(client: Any, engine: FakeEngineClient):
    sampling = {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}
    await client.messages.create(**BODY, stop_sequences=["\n\n", "END"], extra_body=sampling)
    params = engine.admitted[-1].sampling_params
    assert (list(params.stop), params.temperature, params.top_p) == (["\n\n", "END"], 0.3, 0.9)
    assert (params.top_k, params.min_p, params.seed, params.max_tokens) == (5, 0.1, 3, 7)


@pytest.mark.parametrize(
    ("kind", "budget", "expected"), [("enabled", 9, 9), ("disabled", 9, None), ("adaptive", 9, None)]
)
async def test_a_budget_of_thinking_reaches_the_engine(
    engine: FakeEngineClient, kind: str, budget: int, expected: int | None
):
    app = build_app(ready_state(engine, chat=ChatOptions(reasoning_parser="deepseek_r1")))
    body = {**BODY, "thinking": {"type": kind, "budget_tokens": budget}}
    assert (await call(app, "POST", MESSAGES, body)).status == 200
    assert engine.admitted[-1].sampling_params.thinking_token_budget == expected
    error = (await call(app, "POST", MESSAGES, {**body, "thinking": {"type": "enabled", "budget_tokens": -2}})).json()
    assert "thinking.budget_tokens" in error["error"]["message"]


async def test_what_the_api_has_and_the_server_needs_not_is_taken(client: Any):
    message = await client.messages.create(
        **BODY,
        thinking={"type": "enabled", "budget_tokens": 1024},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        extra_headers={"anthropic-beta": "x", "anthropic-version": "2030-01-01"},
    )
    assert message.content[0].text == "HelloHe"


async def test_both_ways_of_sending_a_key_are_taken():
    state = ready_state(FakeEngineClient(), HTTPConfig(api_keys=(Secret("sk-a"),)))
    app = build_app(state)
    for options in ({"api_key": "sk-a"}, {"auth_token": "sk-a", "api_key": None}):
        async with client_of(app, **options) as client:
            assert (await client.messages.create(**BODY)).content
    async with client_of(app, api_key="sk-b") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(**BODY)
    assert caught.value.body["error"]["type"] == "authentication_error"
    answer = await post(app)
    assert (answer.status, answer.json()["error"]["type"]) == (401, "authentication_error")


async def test_errors_have_anthropics_shape_and_the_id_of_their_request(any_app: Any):
    answer = await post(any_app, headers={"x-request-id": "me-1"}, messages=[])
    assert answer.status == 400
    assert answer.json() == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "Invalid 'messages': empty array. Expected an array with minimum length 1, "
            "but got an empty array instead.",
        },
        "request_id": "me-1",
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "me-1"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("body", "headers", "status", "kind"),
    [
        (b"{", {}, 400, "invalid_request_error"),
        (b"[]", {}, 400, "invalid_request_error"),
        (b"{}", {"content-type": "text/plain"}, 415, "invalid_request_error"),
        (b"{}", {"content-length": "99999999"}, 413, "request_too_large"),
        ({**BODY, "model": "other"}, {}, 404, "not_found_error"),
        ({**BODY, "messages": 7}, {}, 400, "invalid_request_error"),
    ],
)
async def test_whatever_is_wrong_with_a_body_is_said_in_that_shape(
    any_app: Any, path: str, body: Any, headers: dict[str, str], status: int, kind: str
):
    answer = await call(any_app, "POST", path, body, headers)
    assert (answer.status, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)


async def test_a_wrong_method_and_an_unknown_path_below_are_said_in_that_shape(any_app: Any):
    assert (await call(any_app, "GET", MESSAGES)).json()["type"] == "error"
    answer = await call(any_app, "GET", MESSAGES + "/batches")
    assert (answer.status, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert "type" not in (await call(any_app, "GET", "/v1/messagesX")).json()


async def test_a_server_that_ends_or_begins_says_so_in_that_shape(app: Any, state: ServerState):
    state.lifecycle.advance(LifecycleState.DRAINING)
    answer = await post(app)
    assert (answer.status, answer.json()["error"]["type"]) == (503, "api_error")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ServerOverloadedError("full"), 529, "overloaded_error"),
        (EngineDeadError("gone"), 503, "api_error"),
        (RequestFailedError("oh"), 500, "api_error"),
        (RuntimeError("oh"), 500, "api_error"),
    ],
)
async def test_what_fails_in_the_engine_has_its_own_status_before_the_first_token(
    app: Any, engine: FakeEngineClient, error: Exception, status: int, kind: str
):
    engine.error = error
    for stream in (False, True):
        answer = await post(app, stream=stream)
        assert (answer.status, answer.json()["error"]["type"]) == (status, kind)


async def test_a_failure_after_the_first_token_is_an_error_event(client: Any, engine: FakeEngineClient):
    engine.error, engine.num_tokens_before_error = ServerOverloadedError("full"), 3
    texts = []
    with pytest.raises(anthropic.APIStatusError) as caught:
        async with client.messages.stream(**BODY) as stream:
            texts += [text async for text in stream.text_stream]
    assert caught.value.body["error"]["type"] == "overloaded_error"
    assert caught.value.body["request_id"]
    assert "".join(texts) in ("", "Hel")


async def test_a_client_that_leaves_ends_its_request(app: Any, engine: FakeEngineClient):
    engine.step_delay_s = 0.002
    for stream in (False, True):
        body = {**BODY, "max_tokens": 100, "stream": stream}
        await call(app, "POST", MESSAGES, body, disconnect_after_parts=int(stream))
    assert len(engine.aborted_request_ids) == 2


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"top_k": "x"}, "top_k"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"n": 2}, "n"),
    ],
)
async def test_a_message_names_the_field_at_fault(any_app: Any, fields: dict[str, Any], name: str):
    answer = await post(any_app, **fields)
    assert answer.status == 400
    assert name in answer.json()["error"]["message"]
