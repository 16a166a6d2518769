"""`POST /v1/responses/compact`: what stays of a conversation, and how it goes on."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.apis.responses import prepare
from llmstack_server.apis.responses.compaction import message_of, sealed
from llmstack_server.testing import FakeEngineClient, call

PATH = "/v1/responses/compact"
INSTRUCTIONS = "Sum up."  # those of the server fill the context of this engine
SUMMARY = "We spoke of Rome: it is sunny."
TALK: list[Any] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Weather?"},
    {"type": "function_call", "call_id": "c", "name": "w", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "sun"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(autouse=True)
def _short_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "INSTRUCTIONS", INSTRUCTIONS)


async def compacted(client: openai.AsyncOpenAI, engine: FakeEngineClient, **fields: Any) -> Any:
    engine.script = SUMMARY
    return await client.responses.compact(model="fake", **fields)


async def test_the_users_messages_stay_and_a_summary_follows(
    client: openai.AsyncOpenAI, engine: FakeEngineClient
) -> None:
    found = await compacted(client, engine, input=TALK, instructions="Be brief.")
    assert (found.object, found.id[:5]) == ("response.compaction", "resp_")
    assert [item.type for item in found.output] == ["message", "message", "compaction"]
    assert [item.content[0].text for item in found.output[:2]] == ["Weather?", "Thanks"]
    assert (message_of(found.output[2].encrypted_content) or "").endswith(SUMMARY)
    assert found.usage.output_tokens == len(SUMMARY)
    asked = engine.rendered[-1].messages
    assert asked[0] == {"role": "system", "content": "Be brief.\n\nBe kind."}
    assert [one["role"] for one in asked[1:]] == ["user", "assistant", "tool", "assistant", "user", "user"]
    assert asked[-1]["content"] == INSTRUCTIONS


async def test_a_conversation_goes_on_after_its_summary(client: openai.AsyncOpenAI, engine: FakeEngineClient) -> None:
    found = await compacted(client, engine, input=TALK)
    items: Any = [item.model_dump(exclude_none=True, warnings=False) for item in found.output]
    follow_up = {"role": "user", "content": "And Oslo?"}
    response = await client.responses.create(model="fake", input=[*items, follow_up], max_output_tokens=16)
    texts = [one["content"] for one in engine.rendered[-1].messages]
    assert texts == ["Weather?", "Thanks", message_of(items[-1]["encrypted_content"]), "And Oslo?"]
    listed = await client.responses.input_items.list(response.id, order="asc")
    assert [item.type for item in listed.data] == ["message", "message", "compaction", "message"]
    again = await client.responses.compact(model="fake", previous_response_id=response.id)
    assert [item.type for item in again.output] == ["message", "message", "message", "compaction"]


async def test_the_oldest_turns_are_left_out_of_a_summary_that_would_not_fit(
    client: openai.AsyncOpenAI, engine: FakeEngineClient
) -> None:
    talk: Any = [{"role": "user", "content": letter * 40} for letter in "abcd"]
    found = await compacted(client, engine, input=talk)
    assert len(found.output) == 5
    assert engine.admitted[-1].prompt == "\n".join(("c" * 40, "d" * 40, INSTRUCTIONS))


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "empty_array"),
        ({"input": "a", "stream": True}, "stream", "unsupported_parameter"),
        ({"input": "a", "tools": []}, "tools", "unsupported_parameter"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "not_found"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]},
            "input[0].encrypted_content",
            "invalid_value",
        ),
        (
            {"input": [{"type": "compaction", "encrypted_content": "summary.%"}]},
            "input[0].encrypted_content",
            "invalid_value",
        ),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content", "missing_required_parameter"),
    ],
)
async def test_what_cannot_be_compacted_is_refused_by_name(
    app: Any, engine: FakeEngineClient, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = await call(app, "POST", PATH, {"model": "fake", **fields})
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["code"]) == (404 if code == "not_found" else 400, param, code)
    assert engine.admitted == []


async def test_a_model_that_writes_nothing_is_an_error(app: Any, engine: FakeEngineClient) -> None:
    engine.script = "  "
    answer = await call(app, "POST", PATH, {"model": "fake", "input": "a"})
    assert answer.status == 500


@given(st.text())
def test_a_summary_is_read_as_it_was_written(text: str) -> None:
    assert (message_of(sealed(text)) or "").endswith(text)


@given(st.text(max_size=40).map(lambda text: f"summary.{text}"))
def test_any_content_is_read_or_refused(content: str) -> None:
    assert isinstance(message_of(content), str | None)
