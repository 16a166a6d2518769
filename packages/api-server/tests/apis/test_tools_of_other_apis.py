"""Tools and reasoning through the official clients of Responses and Messages, over an engine that says a script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from llmstack_server.app import build_app
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.testing import FakeEngineClient, ready_state

SCHEMA = {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"]}
CALLS = "".join(f'<tool_call>{{"name":"w","arguments":{arguments}}}</tool_call>' for arguments in ('{"c":1}', "{}"))
SCRIPT = f"<think>Hm.</think>Ok{CALLS}"
RESPONSE_TOOL: Any = {"type": "function", "name": "w", "parameters": SCHEMA}
MESSAGE_TOOL: Any = {"name": "w", "input_schema": SCHEMA}


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
async def clients(engine: FakeEngineClient) -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    """Of one server whose template thinks, and calls as hermes does."""
    app = build_app(ready_state(engine, chat=ChatOptions(), chat_template="<tool_call></think>"))
    async with AsyncExitStack() as stack:
        yield (
            await stack.enter_async_context(
                openai.AsyncOpenAI(
                    base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=_http(app)
                )
            ),
            await stack.enter_async_context(
                anthropic.AsyncAnthropic(
                    base_url="http://localhost", api_key="none", max_retries=0, http_client=_http(app)
                )
            ),
        )


def _http(app: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app))


async def responses(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    """The whole response, and the one that a stream ends with."""
    fields = {"model": "fake", "input": "?", "max_output_tokens": 127, "tools": [RESPONSE_TOOL], **fields}
    whole = await client.responses.create(**fields)
    async with client.responses.stream(**fields) as stream:
        last = [event async for event in stream][-1]
    return [whole, last.response]


async def messages(client: anthropic.AsyncAnthropic, **fields: Any) -> list[Any]:
    """The whole message, and the one that a stream adds up to."""
    question = {"role": "user", "content": "?"}
    fields = {"model": "fake", "max_tokens": 127, "messages": [question], "tools": [MESSAGE_TOOL], **fields}
    whole = await client.messages.create(**fields)
    async with client.messages.stream(**fields) as stream:
        return [whole, await stream.get_final_message()]


async def test_a_response_holds_thoughts_words_and_calls(clients: Any, engine: FakeEngineClient):
    engine.script = SCRIPT
    for response in await responses(clients[0]):
        assert response.status == "completed"
        reasoning, message, *calls = response.output
        assert (reasoning.content[0].text, message.content[0].text) == ("Hm.", "Ok")
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("w", {"c": 1}), ("w", {})]
        assert len({call.call_id for call in calls}) == 2
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert engine.rendered[-1].tools == [{"type": "function", "function": {"name": "w", "parameters": SCHEMA}}]


async def test_a_message_holds_thoughts_words_and_calls(clients: Any, engine: FakeEngineClient):
    engine.script = SCRIPT
    for message in await messages(clients[1]):
        thinking, text, *calls = message.content
        assert (thinking.thinking, text.text) == ("Hm.", "Ok")
        assert [(call.name, call.input) for call in calls] == [("w", {"c": 1}), ("w", {})]
        assert message.stop_reason == "tool_use"
    assert engine.rendered[-1].tools == [{"type": "function", "function": {"name": "w", "parameters": SCHEMA}}]


async def test_results_go_back_to_the_model_with_what_it_said(clients: Any, engine: FakeEngineClient):
    engine.script = SCRIPT
    response, _ = await responses(clients[0])
    message, _ = await messages(clients[1])
    engine.script = "Fine."
    calls = response.output[2:]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in calls]
    await responses(clients[0], input=results, previous_response_id=response.id, max_output_tokens=20)
    by_id = engine.rendered[-1].messages
    await responses(
        clients[0], input=[{"role": "user", "content": "?"}, *response.output, *results], max_output_tokens=20
    )
    assert engine.rendered[-1].messages == by_id
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "x"} for call in message.content[2:]]
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    await messages(clients[1], messages=turns, max_tokens=20)
    assert [turn["role"] for turn in by_id] == ["user", "assistant", "tool", "tool"]
    assert by_id[1]["reasoning_content"] == "Hm."
    for here, there in zip(by_id, engine.rendered[-1].messages, strict=True):
        assert {key: here[key] for key in ("role", "content")} == {key: there[key] for key in ("role", "content")}


@pytest.mark.parametrize(
    ("response_choice", "message_choice"),
    [
        ("required", {"type": "any"}),
        ({"type": "function", "name": "w"}, {"type": "tool", "name": "w"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "w"}]},
            {"type": "any", "disable_parallel_tool_use": True},
        ),
    ],
)
async def test_a_choice_that_forces_a_call_constrains_the_output(
    clients: Any, engine: FakeEngineClient, response_choice: Any, message_choice: Any
):
    is_named = isinstance(response_choice, dict) and response_choice["type"] == "function"
    engine.script = '{"c":1}' if is_named else '[{"name":"w","parameters":{"c":1}}]'
    for response in await responses(clients[0], tool_choice=response_choice):
        assert [(item.type, item.name, item.arguments) for item in response.output] == [
            ("function_call", "w", '{"c":1}')
        ]
    assert engine.admitted[-1].sampling_params.structured_outputs is not None
    for message in await messages(clients[1], tool_choice=message_choice):
        assert [(block.type, block.name, block.input) for block in message.content] == [("tool_use", "w", {"c": 1})]
        assert message.stop_reason == "tool_use"
    assert engine.admitted[-1].sampling_params.structured_outputs is not None


async def test_no_tool_is_called_where_none_may_be(clients: Any, engine: FakeEngineClient):
    engine.script = "<think>Hm.</think>" + CALLS
    for response in await responses(clients[0], tool_choice="none"):
        assert response.output_text == CALLS
    for message in await messages(clients[1], tool_choice={"type": "none"}):
        assert message.content[1].text == CALLS
        assert message.stop_reason == "end_turn"


async def test_effort_and_thinking_reach_the_template(clients: Any, engine: FakeEngineClient):
    engine.script = "Hi"
    await responses(clients[0], reasoning={"effort": "none"}, tools=[])
    assert engine.rendered[-1].template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}
    await messages(clients[1], thinking={"type": "disabled"}, output_config={"effort": "low"}, tools=[])
    assert engine.rendered[-1].template_kwargs == {"reasoning_effort": "low", "enable_thinking": False}


async def test_the_form_of_a_text_constrains_the_output(clients: Any, engine: FakeEngineClient):
    engine.script = "{}"
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    for response in await responses(clients[0], text={"format": form}, tools=[]):
        assert response.output_text == "{}"
    constraint = engine.admitted[-1].sampling_params.structured_outputs
    assert constraint is not None
    await messages(clients[1], output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, tools=[])
    assert engine.admitted[-1].sampling_params.structured_outputs == constraint


async def test_other_constraints_are_taken_alone_only(clients: Any, engine: FakeEngineClient):
    engine.script = "a"
    choice = {"structured_outputs": {"choice": ["a", "b"]}}
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    await responses(clients[0], tools=[], extra_body=choice)
    assert engine.admitted[-1].sampling_params.structured_outputs is not None
    with pytest.raises(openai.BadRequestError) as refused:
        await responses(clients[0], tools=[], extra_body=choice, text={"format": form})
    assert refused.value.param == "text.format"
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        await messages(clients[1], tools=[], extra_body=choice, output_config={"format": form})


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function", "name": "w w"}, "tools[0].name"),
        ({"type": "function", "name": "w", "parameters": 7}, "tools[0].parameters"),
        ({"type": "function", "name": "w", "strict": "x"}, "tools[0].strict"),
    ],
)
async def test_a_tool_at_fault_is_named_as_its_user_calls_it(clients: Any, tool: Any, param: str):
    with pytest.raises(openai.BadRequestError) as refused:
        await responses(clients[0], tools=[tool])
    assert refused.value.param == param
    renamed = {"input_schema" if key == "parameters" else key: value for key, value in tool.items() if key != "type"}
    with pytest.raises(anthropic.BadRequestError) as caught:
        await messages(clients[1], tools=[{"input_schema": {}, **renamed}])
    assert param.replace("parameters", "input_schema") in caught.value.message


async def test_a_tool_that_is_not_there_cannot_be_chosen(clients: Any):
    with pytest.raises(openai.BadRequestError) as refused:
        await responses(clients[0], tool_choice={"type": "function", "name": "other"})
    assert refused.value.param == "tool_choice.name"
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.name"):
        await messages(clients[1], tool_choice={"type": "tool", "name": "other"})


PATCH = {"type": "custom", "name": "w", "description": "Writes."}
REGEX = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}
LARK = PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a" | "b"'}}
CHOSEN = {"type": "custom", "name": "w"}
TEXT = 'a "b"\n\\é'


def calling(arguments: str) -> str:
    return f'<tool_call>{{"name":"w","arguments":{arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("script", "expected", "status"),
    [
        (calling(json.dumps({"input": TEXT})), TEXT, "completed"),
        (calling(json.dumps({"input": ""})), "", "completed"),
        (calling(json.dumps({"code": "x"})), '{"code": "x"}', "completed"),
        (calling(json.dumps({"input": "abc" * 60})), "abcab", "incomplete"),
    ],
)
async def test_a_call_of_a_custom_tool_is_one_text(
    clients: Any, engine: FakeEngineClient, script: str, expected: str, status: str
):
    engine.script = script
    limit = {} if status == "completed" else {"max_output_tokens": 51}
    for response in await responses(clients[0], tools=[PATCH], **limit):
        (call,) = [item for item in response.output if item.type == "custom_tool_call"]
        assert (call.name, call.input, response.status) == ("w", expected, status)
        assert call.id.startswith("ctc_")
    (tool,) = engine.rendered[-1].tools
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": "w", "parameters": schema | {"additionalProperties": False}, "description": "Writes."}
    assert tool == {"type": "function", "function": function}


async def test_the_text_of_a_custom_tool_is_streamed_with_events_of_its_own(clients: Any, engine: FakeEngineClient):
    engine.script = calling(json.dumps({"input": TEXT}))
    fields = {"model": "fake", "input": "?", "max_output_tokens": 127, "tools": [PATCH]}
    events = [event async for event in await clients[0].responses.create(stream=True, **fields)]
    kinds = [event.type for event in events if "custom" in event.type]
    assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    done = next(event for event in events if event.type == kinds[-1])
    assert (done.input, "".join(event.delta for event in events if event.type == kinds[0])) == (TEXT, TEXT)


async def test_a_custom_call_and_its_output_go_back_to_the_model(clients: Any, engine: FakeEngineClient):
    engine.script = calling(json.dumps({"input": TEXT}))
    response, _ = await responses(clients[0], tools=[PATCH])
    engine.script = "Fine."
    (call,) = [item for item in response.output if item.type == "custom_tool_call"]
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "x"}
    for given in (
        {"input": [result], "previous_response_id": response.id},
        {"input": [{"role": "user", "content": "?"}, call.model_dump(), result]},
    ):
        await responses(clients[0], tools=[PATCH], max_output_tokens=20, **given)
        said, answer = engine.rendered[-1].messages[-2:]
        assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"input": TEXT}
        assert (answer["role"], answer["content"], answer["name"]) == ("tool", "x", "w")


@pytest.mark.parametrize(
    "choice", ["required", CHOSEN, {"type": "allowed_tools", "mode": "required", "tools": [CHOSEN]}]
)
async def test_a_lark_grammar_is_that_of_the_whole_answer(clients: Any, engine: FakeEngineClient, choice: Any):
    engine.script = " a\n"
    for response in await responses(clients[0], tools=[LARK], tool_choice=choice):
        assert [(item.type, item.input) for item in response.output] == [("custom_tool_call", " a\n")]
    constraint = engine.admitted[-1].sampling_params.structured_outputs
    assert (constraint.grammar, constraint.json) == ('start: "a" | "b"', None)
    assert 'start: "a" | "b"' in engine.rendered[-1].tools[0]["function"]["description"]


@pytest.mark.parametrize("choice", [None, "auto", "required", CHOSEN])
async def test_a_regular_expression_is_the_pattern_of_the_text(clients: Any, engine: FakeEngineClient, choice: Any):
    engine.script = "x"
    options = {} if choice is None else {"tool_choice": choice}
    await responses(clients[0], tools=[REGEX, RESPONSE_TOOL | {"name": "v"}], max_output_tokens=5, **options)
    constraint = engine.admitted[-1].sampling_params.structured_outputs
    assert '"pattern": "^(?:[a-z]+)$"' in json.dumps([constraint.json, json.loads(constraint.structural_tag or "0")])


@pytest.mark.parametrize(
    ("tools", "choice", "param", "code"),
    [
        ([LARK], "auto", "tools[0].format.syntax", "unsupported_value"),
        ([LARK], None, "tools[0].format.syntax", "unsupported_value"),
        ([RESPONSE_TOOL | {"name": "v"}, LARK], "required", "tools[1].format.syntax", "unsupported_value"),
        ([RESPONSE_TOOL | {"name": {}}], None, "tools[0].name", "invalid_type"),
        ([PATCH | {"name": None}], None, "tools[0].name", "missing_required_parameter"),
        ([PATCH | {"name": "a b"}], None, "tools[0].name", "invalid_value"),
        ([PATCH | {"format": "text"}], None, "tools[0].format", "invalid_type"),
        ([PATCH | {"format": {"type": "x"}}], None, "tools[0].format.type", "invalid_value"),
        ([PATCH | {"format": {"type": "grammar", "syntax": "ebnf"}}], None, "tools[0].format.syntax", "invalid_value"),
        (
            [PATCH | {"format": {"type": "grammar", "syntax": "lark"}}],
            None,
            "tools[0].format.definition",
            "missing_required_parameter",
        ),
    ],
)
async def test_a_format_that_cannot_hold_is_refused(clients: Any, tools: Any, choice: Any, param: str, code: str):
    options = {} if choice is None else {"tool_choice": choice}
    with pytest.raises(openai.BadRequestError) as caught:
        await responses(clients[0], tools=tools, **options)
    assert (caught.value.param, caught.value.code) == (param, code)


async def test_a_grammar_of_a_tool_that_cannot_be_called_does_no_harm(clients: Any, engine: FakeEngineClient):
    engine.script = "x"
    await responses(clients[0], tools=[LARK], tool_choice="none", max_output_tokens=5)
    other = RESPONSE_TOOL | {"name": "v"}
    await responses(clients[0], tools=[LARK, other], tool_choice={"type": "function", "name": "v"}, max_output_tokens=5)
