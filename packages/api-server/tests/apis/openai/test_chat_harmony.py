"""gpt-oss: the channels of harmony become reasoning, calls and the answer, in any pieces and over each API."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from server_helpers.chat_tools import USER, Server, tool

from llmstack_server.testing import call, engine_client

HARMONY = "<|channel|>analysis <|channel|>commentary to=functions.now"  # what its chat template has
THOUGHT = "<|channel|>analysis<|message|>The clock.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"zone": "UTC"}<|call|>'
ANSWER = "<|channel|>final<|message|>It is noon.<|return|>"


@pytest.fixture(autouse=True)
def longer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine has a token for each character."""
    monkeypatch.setattr(engine_client, "LIMITS", dataclasses.replace(engine_client.LIMITS, max_model_len=1024))


async def test_reasoning_and_answer_are_the_channels_of_harmony() -> None:
    message = await Server(HARMONY).both(THOUGHT + ANSWER)
    assert (message["reasoning_content"], message["content"]) == ("The clock.", "It is noon.")
    assert message["finish_reason"] == "stop"


@pytest.mark.parametrize("preamble", ["", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"])
async def test_a_call_follows_reasoning_and_what_the_model_says_before(preamble: str) -> None:
    message = await Server(HARMONY).both(THOUGHT + preamble + CALL, tools=[tool()])
    assert message["reasoning_content"] == "The clock."
    assert message["content"] == ("I look." if preamble else None)
    (found,) = message["tool_calls"]
    assert found["function"] == {"name": "now", "arguments": '{"zone": "UTC"}'}
    assert message["finish_reason"] == "tool_calls"


async def test_the_special_tokens_of_harmony_reach_the_parsers() -> None:
    server = Server(HARMONY)
    await server.ask(THOUGHT + ANSWER)
    kept = server.engine.admitted[-1].sampling_params.kept_special_tokens
    assert {"<|channel|>", "<|message|>", "<|end|>"} <= set(kept)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_other_apis_have_the_same_parts(is_streamed: bool) -> None:
    server = Server(HARMONY)

    async def parts_of(path: str, body: dict[str, Any]) -> list[Any]:
        server.engine.script = THOUGHT + CALL
        answer = await call(server.app, "POST", path, {"model": "fake", "stream": is_streamed, **body})
        assert answer.status == 200, answer.body
        if not is_streamed:
            found = answer.json()
        else:
            lines = [line.removeprefix("data: ") for line in answer.body.decode().splitlines()]
            events = [json.loads(line) for line in lines if line.startswith("{")]
            if path == "/v1/messages":
                return [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
            found = next(event for event in events if event["type"] == "response.completed")["response"]
        return [part["type"] for part in found["content" if path == "/v1/messages" else "output"]]

    schema = {"type": "object", "properties": {}}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 100}}
    messages = {"messages": [USER], "max_tokens": 600, "tools": [{"name": "now", "input_schema": schema}], **thinking}
    assert await parts_of("/v1/messages", messages) == ["thinking", "tool_use"]
    responses = {"input": "hi", "tools": [{"type": "function", "name": "now", "parameters": schema}], "store": False}
    assert await parts_of("/v1/responses", responses) == ["reasoning", "function_call"]
