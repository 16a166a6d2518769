"""Tools and reasoning in chat completions, over an engine that says what a script says."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_helpers.chat_tools import CALL, CHAT, THINKING, USER, Server, tool

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_server.app import build_app
from llmstack_server.testing import call, ready_state


async def test_a_call_is_separated_from_the_content_before_it():
    message = await Server().both("Let me see. " + CALL.replace("é", "e"), tools=[tool()])
    assert message["content"] == "Let me see. "
    (found,) = message["tool_calls"]
    assert found["id"].startswith("call_")
    assert (found["type"], found["function"]) == ("function", {"name": "now", "arguments": '{"a": "e"}'})
    assert message["finish_reason"] == "tool_calls"


async def test_calls_alone_leave_no_content():
    message = await Server().both('\n<tool_call>{"name": "now"}</tool_call>\n' * 2, tools=[tool()])
    assert message["content"] is None
    assert [entry["function"]["name"] for entry in message["tool_calls"]] == ["now", "now"]
    assert len({entry["id"] for entry in message["tool_calls"]}) == 2


async def test_an_answer_without_calls_is_an_answer():
    message = await Server().both("Hello <b>you</b>", tools=[tool()])
    assert (message["content"], message["finish_reason"]) == ("Hello <b>you</b>", "stop")
    assert "tool_calls" not in message


async def test_without_parallel_calls_the_first_one_stays():
    script = '<tool_call>{"name": "now"}</tool_call>' * 2
    message = await Server().both(script, tools=[tool()], parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1


async def test_a_call_that_is_cut_off_ends_with_length_and_can_be_decoded():
    message = await Server().both(CALL, tools=[tool()], max_tokens=47)
    assert message["finish_reason"] == "length"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": ""}'


async def test_a_call_that_is_cut_before_its_arguments_is_no_call():
    message = await Server().both("Well." + CALL, tools=[tool()], max_tokens=len("Well.") + 25)
    assert (message["finish_reason"], message["content"]) == ("length", "Well.")
    assert "tool_calls" not in message


async def test_arguments_can_be_decoded_where_the_model_stops_inside_of_them():
    text = CALL.replace("é", "e")
    for script in (text[:50], text[:47], text[:44]):
        message = await Server().both(script, tools=[tool()])
        assert isinstance(json.loads(message["tool_calls"][0]["function"]["arguments"]), dict)
        assert message["finish_reason"] == "tool_calls"


async def test_the_arguments_of_a_named_function_can_be_decoded_where_they_are_cut():
    choice = {"type": "function", "function": {"name": "now"}}
    for max_tokens in range(1, 10):
        message = await Server().both('{"a": [1, "b"]}', tools=[tool()], tool_choice=choice, max_tokens=max_tokens)
        assert isinstance(json.loads(message["tool_calls"][0]["function"]["arguments"]), dict)
        assert message["finish_reason"] == "length"


async def test_nothing_is_parsed_without_tools_or_with_the_choice_none():
    script = '<tool_call>{"name": "now"}</tool_call>'
    server = Server()
    assert (await server.both(script))["content"] == script
    assert (await server.both(script, tools=[tool()], tool_choice="none"))["content"] == script
    assert server.engine.admitted[-1].sampling_params.kept_special_tokens == ()


async def test_markers_stay_in_the_text_where_a_parser_needs_them():
    server = Server(THINKING)
    await server.ask("x", tools=[tool()])
    kept = server.engine.admitted[-1].sampling_params.kept_special_tokens
    assert kept == ("<tool_call>", "</tool_call>", "<think>", "</think>")


async def test_tools_reach_the_template_unless_an_option_excludes_them():
    shown, hidden = Server(), Server(excludes_unused_tools=True)
    for server in (shown, hidden):
        await server.ask("x", tools=[tool()], tool_choice="none")
    assert shown.engine.rendered[-1].tools == [tool()]
    assert hidden.engine.rendered[-1].tools is None
    await hidden.ask("x", tools=[tool()])
    assert hidden.engine.rendered[-1].tools == [tool()]


async def test_a_required_call_is_an_array_under_a_schema():
    server = Server(template=None)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    script = '[{"name": "now", "parameters": {"a": "b"}}]'
    message = await server.both(script, tools=[tool(parameters=schema), tool("other")], tool_choice="required")
    assert message["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": "b"}'}
    constraint = server.engine.admitted[-1].sampling_params.structured_outputs
    assert constraint is not None
    items = json.loads(constraint.json)["items"]["anyOf"]
    assert items[0]["properties"] == {"name": {"const": "now"}, "parameters": schema}
    assert items[1]["properties"]["parameters"] == {"type": "object"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=str)
async def test_a_demanded_call_is_made_and_the_format_is_for_texts(choice: Any):
    server = Server()
    named = {"name": "x", "schema": {"type": "object", "properties": {"z": {"type": "string"}}}}
    fields = {"tools": [tool("look")], "response_format": {"type": "json_schema", "json_schema": named}}
    script = '[{"name": "look", "parameters": {}}]' if choice == "required" else "{}"
    message = await server.both(script, tool_choice=choice, **fields)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]
    assert "z" not in json.dumps(server.engine.admitted[-1].sampling_params.structured_outputs.json)
    # Without a call the format holds.
    await server.both('{"z": ""}', tool_choice="none", **fields)
    assert "z" in json.dumps(server.engine.admitted[-1].sampling_params.structured_outputs.json)


async def test_a_required_call_without_parallel_ones_is_one():
    server = Server()
    fields = {"tools": [tool()], "tool_choice": "required", "parallel_tool_calls": False}
    await server.ask('[{"name": "now", "parameters": {}}]', **fields)
    assert json.loads(server.engine.admitted[-1].sampling_params.structured_outputs.json)["maxItems"] == 1


async def test_the_call_of_a_named_function_is_its_arguments_and_ends_with_stop():
    server = Server(template=None)
    choice = {"type": "function", "function": {"name": "now"}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    message = await server.both('{"a": 1}', tools=[tool("x"), tool(parameters=schema)], tool_choice=choice)
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": 1}'}
    assert message["finish_reason"] == "stop"
    assert json.loads(server.engine.admitted[-1].sampling_params.structured_outputs.json) == schema


async def test_strict_functions_keep_to_their_schemas():
    server = Server()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await server.ask("x", tools=[tool(parameters=schema, strict=True), tool("other")])
    tag = json.loads(server.engine.admitted[-1].sampling_params.structured_outputs.structural_tag)
    contents = [entry["content"]["json_schema"]["properties"] for entry in tag["format"]["tags"]]
    assert contents[0] == {"name": {"const": "now"}, "arguments": schema}
    assert contents[1]["arguments"] == {"type": "object"}
    await server.ask("x", tools=[tool(parameters=schema)])
    assert server.engine.admitted[-1].sampling_params.structured_outputs is None


async def test_of_allowed_tools_the_model_sees_those_alone():
    server = Server()
    allowed = {"mode": "auto", "tools": [tool("b")]}
    await server.ask("x", tools=[tool("a"), tool("b")], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert server.engine.rendered[-1].tools == [tool("b")]


REFUSED = [
    ({"tools": []}, "empty_array", "tools"),
    ({"tools": {}}, "invalid_type", "tools"),
    ({"tools": [tool()] * 129}, "array_above_max_length", "tools"),
    ({"tools": [{}]}, "missing_required_parameter", "tools[0].type"),
    ({"tools": [tool(), {"type": "web_search"}]}, "unsupported_value", "tools[1].type"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
    ({"tools": [{"type": "function", "function": 1}]}, "invalid_type", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "missing_required_parameter", "tools[0].function.name"),
    ({"tools": [tool("a b")]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [tool("")]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [tool("a" * 65)]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [tool("é")]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [tool(3)]}, "invalid_type", "tools[0].function.name"),  # type: ignore[arg-type]  # on purpose
    ({"tools": [tool(parameters=[])]}, "invalid_type", "tools[0].function.parameters"),
    ({"tools": [tool(description=1)]}, "invalid_type", "tools[0].function.description"),
    ({"tools": [tool(strict=1)]}, "invalid_type", "tools[0].function.strict"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tools": [tool()], "tool_choice": "any"}, "invalid_value", "tool_choice"),
    ({"tools": [tool()], "tool_choice": 1}, "invalid_type", "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "custom"}}, "unsupported_value", "tool_choice.type"),
    (
        {"tools": [tool()], "tool_choice": {"type": "function"}},
        "missing_required_parameter",
        "tool_choice.function.name",
    ),
    ({"tools": [tool()], "tool_choice": tool("b")}, "invalid_value", "tool_choice.function.name"),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "invalid_type", "tool_choice.allowed_tools"),
    (
        {"tools": [tool()], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "invalid_value",
        "tool_choice",
    ),
    ({"functions": [{"name": "now"}]}, "unsupported_parameter", "functions"),
    ({"function_call": {"name": "now"}}, "unsupported_parameter", "function_call"),
    ({"chat_template": "x"}, "unsupported_parameter", "chat_template"),
    ({"documents": "x"}, "invalid_type", "documents"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED)
async def test_malformed_tools_are_refused_by_name(fields: dict[str, Any], code: str, param: str):
    answer = await Server().ask("x", **fields)
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, code, param), error


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_a_demanded_call_is_refused_with_a_beam_search(choice: Any):
    fields = {"tools": [tool()], "tool_choice": choice, "use_beam_search": True, "n": 2, "temperature": 0}
    answer = await Server().ask("x", **fields)
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "invalid_value", "use_beam_search")


async def test_without_a_parser_tools_are_refused_with_the_flag_to_set():
    answer = await Server(template=None).ask("x", tools=[tool()])
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "unsupported_value", "tools")
    assert re.search(r"--tool-call-parser, of which there are \d+\.$", error["message"])
    assert (await Server(template=None).ask("x", tools=[tool()], tool_choice="none")).status == 200


async def test_the_end_of_an_answer_that_calls_is_a_chunk_of_its_own():
    server = Server()
    fields = {"tools": [tool()], "tool_choice": "required", "stream": True}
    events = (await server.ask('[{"name": "now", "parameters": {}', **fields)).events()  # ends in the arguments
    last, before = events[-2]["choices"][0], events[-3]["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "tool_calls", None)
    assert before["delta"]["tool_calls"]
    assert before["finish_reason"] is None


async def test_logprobs_come_with_every_token_markers_too():
    script = 'a<tool_call>{"name": "now"}</tool_call>'
    fields = {"tools": [tool()], "logprobs": True}
    server = Server()
    whole = (await server.ask(script, **fields)).json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in whole) == script
    chunks = [event["choices"][0] for event in (await server.ask(script, stream=True, **fields)).events()[:-1]]
    assert [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]] == whole


async def test_several_choices_have_calls_of_their_own():
    answer = await Server().ask('<tool_call>{"name": "now"}</tool_call>', tools=[tool()], n=3)
    choices = answer.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


async def test_documents_templates_and_arguments_reach_the_template():
    server = Server(trusts_request_template=True, template_kwargs={"a": 1, "b": 2})
    fields = {"documents": [{"title": "A"}], "chat_template": "{{ x }}", "chat_template_kwargs": {"b": 3}}
    assert (await server.ask("x", **fields, reasoning_effort="low")).status == 200
    found = server.engine.rendered[-1]
    assert (found.documents, found.chat_template) == ([{"title": "A"}], "{{ x }}")
    assert found.template_kwargs == {"a": 1, "b": 3, "reasoning_effort": "low"}


async def test_tokenize_counts_the_prompt_with_its_tools():
    server = Server()
    body = {"messages": [USER], "tools": [tool()]}
    assert (await call(server.app, "POST", "/tokenize", body)).json()["count"] == 2
    assert server.engine.rendered[-1].tools == [tool()]


async def test_the_role_of_answers_is_a_flag():
    server = Server(response_role="bot")
    assert (await server.ask("x")).json()["choices"][0]["message"]["role"] == "bot"
    assert (await server.ask("x", stream=True)).events()[0]["choices"][0]["delta"]["role"] == "bot"


WEATHER = {"name": "now", "description": "Tells.", "input_schema": {"type": "object"}}


async def test_the_other_apis_call_over_the_same_parsers():
    server = Server(THINKING)
    server.engine.script = '<think>hm</think>So <tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
    body = {"model": "fake", "messages": [USER], "tools": [WEATHER], "max_tokens": 120}
    message = (await call(server.app, "POST", "/v1/messages", body)).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert (message["content"][-1]["input"], message["stop_reason"]) == ({"a": 1}, "tool_use")
    body = {"input": "Hi", "tools": [{"type": "function", "name": "now", "parameters": {}}]}
    response = (await call(server.app, "POST", "/v1/responses", body)).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][-1]["arguments"] == '{"a": 1}'
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


@pytest.fixture
async def real_app(tmp_path: Path) -> AsyncIterator[Any]:
    folder, core = write_model_folder(tmp_path / "model"), FakeEngineCoreClient()
    engine = AsyncLLM(load_model_config(str(folder)), core, load_tokenizer(folder))
    yield build_app(ready_state(engine, ready=core.ready, chat_template=THINKING))
    await engine.shutdown()


NONSENSE = {"properties": {"a": {"type": "nonsense"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("a"), tool(parameters=NONSENSE)], "tool_choice": "required"}, "tools"),
        ({"tools": [tool("a"), tool(parameters=NONSENSE)], "tool_choice": tool()}, "tools[1].function.parameters"),
        ({"tools": [tool(parameters=NONSENSE, strict=True)]}, "tools"),
        ({"structured_outputs": {"json": NONSENSE}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "["}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NONSENSE}}},
            "response_format.json_schema.schema",
        ),
    ],
)
async def test_a_schema_that_is_none_is_refused_by_the_name_that_its_user_knows(
    real_app: Any, fields: dict[str, Any], param: str
):
    answer = await call(real_app, "POST", CHAT, {"messages": [USER], **fields})
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "invalid_json_schema", param), error


async def test_a_response_template_tells_calls_reasoning_and_content_apart():
    calls = {
        "open_pattern": r"<act (?P<name>\w+)>", "close": "</act>", "content": "kv-lines", "repeats": True,
        "content_args": {"kv_sep": "="},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }  # fmt: skip
    fields = {"thinking": {"open": "<hm>", "close": "</hm>"}, "tool_calls": calls, "content": {}}
    server = Server(None, response_template={"fields": fields})
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    message = await server.both(
        "<hm>It is late.</hm>So <act now>\na=1\nb=x\n</act>", tools=[tool(parameters=parameters)]
    )
    assert (message["reasoning"], message["content"]) == ("It is late.", "So ")
    assert [entry["function"] for entry in message["tool_calls"]] == [
        {"name": "now", "arguments": '{"a": 1, "b": "x"}'}
    ]
    assert server.engine.admitted[-1].sampling_params.kept_special_tokens == ("</act>", "<hm>", "</hm>")
