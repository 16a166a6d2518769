"""Reasoning is separated from the answer, counted, and followed by calls and constraints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_helpers.chat_tools import THINKING, USER, Server, tool

THOUGHT = "<think>\nhm\n</think>\n\nHi"


async def test_reasoning_is_separated_from_the_answer_and_counted():
    server = Server(THINKING)
    message = await server.both(THOUGHT)
    assert (message["reasoning_content"], message["content"], message["finish_reason"]) == ("hm", "Hi", "stop")
    usage = (await server.ask(THOUGHT)).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert usage["completion_tokens"] == len(THOUGHT)


async def test_reasoning_alone_leaves_no_content():
    message = await Server(THINKING).both("<think>hm")
    assert (message["reasoning_content"], message["content"]) == ("hm", None)


async def test_reasoning_is_left_out_where_the_request_excludes_it():
    message = await Server(THINKING).both(THOUGHT, include_reasoning=False)
    assert message["content"] == "Hi"
    assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("content", "script", "reasoning", "answer"),
    [
        ("Hi <think>\n", "hm</think>Hi", "hm", "Hi"),
        ("Hi <think>\n\n</think>\n\n", "Hi</think>", None, "Hi</think>"),
        ("What is <think>?", "Hi", None, "Hi"),
    ],
)
async def test_how_the_prompt_ends_tells_whether_the_model_thinks(
    content: str, script: str, reasoning: str | None, answer: str
):
    message = await Server(THINKING).both(script, messages=[{"role": "user", "content": content}])
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, answer)


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [("<think>so", "hm", "Hi"), ("<think>a</think>b", None, "hm</think>Hi"), ("b", None, "hm</think>Hi")],
)
async def test_a_begun_message_goes_on_where_it_was(begun: str, reasoning: str | None, content: str):
    messages = [USER, {"role": "assistant", "content": begun}]
    message = await Server(THINKING).both("hm</think>Hi", messages=messages, continue_final_message=True)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


async def test_a_request_switches_off_reasoning_that_is_on_by_default():
    server = Server(reasoning_parser="deepseek_r1")
    assert (await server.both("hm</think>Hi"))["reasoning_content"] == "hm"
    message = await server.both("Hi", chat_template_kwargs={"enable_thinking": False})
    assert message["content"] == "Hi"
    message = await server.both("Hi", reasoning_effort="none")
    assert message["content"] == "Hi"
    assert server.engine.rendered[-1].template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}


async def test_calls_follow_the_reasoning():
    message = await Server(THINKING).both('<think>a</think>\n<tool_call>{"name": "now"}</tool_call>', tools=[tool()])
    assert (message["reasoning_content"], message["content"]) == ("a", None)
    assert message["tool_calls"][0]["function"]["name"] == "now"


def formats(server: Server) -> Any:
    """The constraint that the last request had, as a structural tag."""
    constraint = server.engine.admitted[-1].sampling_params.structured_outputs
    assert constraint is not None
    return json.loads(constraint.structural_tag)["format"]


async def test_a_constraint_holds_behind_the_reasoning_that_the_prompt_has_begun():
    server = Server(THINKING)
    fields = {"tools": [tool()], "tool_choice": "required", "messages": [{"role": "user", "content": "<think>"}]}
    message = await server.both('hm</think>[{"name": "now", "parameters": {}}]', **fields)
    assert (message["reasoning_content"], len(message["tool_calls"])) == ("hm", 1)
    assert [part["type"] for part in formats(server)["elements"]] == ["tag", "regex", "json_schema"]


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "Hi"},
        {"choice": ["Hi"]},
        {"json": {"type": "string"}},
        {"structural_tag": {"format": {"type": "any_text"}}},
    ],
)
async def test_reasoning_that_may_begin_stays_the_models_choice(constraint: dict[str, Any]):
    server = Server(THINKING)
    message = await server.both("<think>hm</think>Hi", structured_outputs=constraint)
    assert (message["reasoning_content"], message["content"]) == ("hm", "Hi")
    with_reasoning, without = formats(server)["elements"]
    assert with_reasoning["elements"][0]["begin"] == "<think>"
    assert with_reasoning["elements"][-1] == without
    assert (await server.both("Hi", structured_outputs=constraint))["content"] == "Hi"


async def test_a_constraint_that_cannot_follow_reasoning_leaves_no_room_for_it():
    server = Server(reasoning_parser="deepseek_r1")
    message = await server.both("Hi", structured_outputs={"grammar": 'start: "Hi"'})
    assert message["content"] == "Hi"
    assert "reasoning_content" not in message
