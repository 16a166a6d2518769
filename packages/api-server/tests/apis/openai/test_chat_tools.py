"""Tools and reasoning in chat completions, over an engine that says what a script says."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_server.app import build_app
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
HERMES, THINKING = "<tool_call>", "<tool_call></think>"
CALL = '<tool_call>{"name": "now", "arguments": {"a": "é"}}</tool_call>'


def tool(name: str = "now", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def folded(answer: Answer) -> dict[str, Any]:
    """The message that the chunks of a stream add up to, as the official clients put it together."""
    *chunks, done = answer.events()
    assert done == "[DONE]"
    message: dict[str, Any] = {"calls": []}
    for choice in (chunk["choices"][0] for chunk in chunks if chunk["choices"]):
        for piece in choice["delta"].get("tool_calls", ()):
            if piece["index"] == len(message["calls"]):
                message["calls"].append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
            message["calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
        assert choice["delta"].get("reasoning") == choice["delta"].get("reasoning_content")
        for key in ("content", "reasoning_content"):
            message[key] = message.get(key, "") + (choice["delta"].get(key) or "")
        message["finish_reason"] = choice["finish_reason"]
    return message


class Server:
    """One application over one scripted engine."""

    def __init__(self, template: str | None = HERMES, **options: Any) -> None:
        self.engine = FakeEngineClient()
        self.app = build_app(ready_state(self.engine, chat=ChatOptions(**options), chat_template=template))

    async def ask(self, script: str | None = None, **fields: Any) -> Answer:
        self.engine.script = script
        return await call(self.app, "POST", CHAT, {"messages": [USER], **fields})

    async def both(self, script: str, **fields: Any) -> dict[str, Any]:
        """The message as a stream and as a whole answer, which must agree."""
        whole = await self.ask(script, **fields)
        assert whole.status == 200, whole.body
        choice = whole.json()["choices"][0]
        streamed = folded(await self.ask(script, stream=True, **fields))
        message = choice["message"]
        calls = [{**entry["function"], "id": ""} for entry in message.get("tool_calls", ())]
        assert message.get("reasoning") == message.get("reasoning_content")
        assert streamed == {
            "content": message["content"] or "",
            "reasoning_content": message.get("reasoning_content", ""),
            "finish_reason": choice["finish_reason"],
            "calls": [{**entry, "id": streamed["calls"][index]["id"]} for index, entry in enumerate(calls)],
        }
        return {**message, "finish_reason": choice["finish_reason"]}


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


async def test_a_call_that_is_cut_off_ends_with_length():
    message = await Server().both(CALL, tools=[tool()], max_tokens=47)
    assert message["finish_reason"] == "length"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "'


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


async def test_without_a_parser_tools_are_refused_with_the_flag_to_set():
    answer = await Server(template=None).ask("x", tools=[tool()])
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "unsupported_value", "tools")
    assert re.search(r"--tool-call-parser \(.*hermes, ", error["message"])
    assert (await Server(template=None).ask("x", tools=[tool()], tool_choice="none")).status == 200


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
