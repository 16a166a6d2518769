"""Tools and reasoning over HTTP with the official client, under templates like those of Qwen, Llama and Mistral.

The echoing runner says what its prompt begins with, so each template begins with what the model is to say, chosen by an
argument of the template; with its special tokens, and an end of turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamEvent

from llmstack_llm.testing import byte_tokenizer, write_model_folder

PARIS, ROME = '{"city": "Paris", "days": 3}', '{"city": "Rome", "days": 1}'
QWEN_TOKENS = ("<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
QWEN = """
{%- set said = {
  'one': 'I look.\\n<tool_call>\\n{"name": "get_weather", "arguments": PARIS}\\n</tool_call>',
  'two': '<think>\\nBoth.\\n</think>\\n\\n<tool_call>\\n{"name": "get_weather", "arguments": PARIS}\\n</tool_call>\\n'
    ~ '<tool_call>\\n{"name": "get_weather", "arguments": ROME}\\n</tool_call>',
  'plain': '<think>\\nHm, é.\\n</think>\\n\\nSunny, 日本.'} -%}
{{- said[script] ~ '<|im_end|>\\n' if script }}
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' ~ message.content ~ '</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
LLAMA = """
{%- set said = {
  'one': '<|python_tag|>{"name": "get_weather", "parameters": PARIS}',
  'two': '{"name": "get_weather", "parameters": PARIS}; {"name": "get_weather", "parameters": ROME}',
  'plain': '{"not": "a call"}'} -%}
{{- said[script] ~ '<|im_end|>' if script }}{{- bos_token }}
{%- for message in messages %}{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
{%- for call in message.tool_calls or [] %}
{{- {"name": call.function.name, "parameters": call.function.arguments} | tojson }}{%- endfor %}
{{- message.content | trim ~ '<|eot_id|>' }}
{%- if loop.first and tools %}{{- tools | tojson }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL_TOKENS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
MISTRAL = """
{%- set said = {
  'one': '[TOOL_CALLS] [{"name": "get_weather", "arguments": PARIS}]',
  'two': '[TOOL_CALLS]get_weather PARIS[TOOL_CALLS]get_weather ROME',
  'plain': 'Sunny.'} -%}
{{- said[script] ~ '<|im_end|>' if script }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[AVAILABLE_TOOLS]' ~ tools | tojson if tools }}
{{- '[INST]' ~ message.content ~ '[/INST]' }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' ~ message.tool_call_id ~ message.content }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS]' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- call.function.name ~ call.function.arguments | tojson }}{%- endfor %}
{%- else %}{{- message.content ~ '<|im_end|>' }}{%- endif %}{%- endfor %}"""
FAMILIES = {"qwen": (QWEN, QWEN_TOKENS), "llama": (LLAMA, LLAMA_TOKENS), "mistral": (MISTRAL, MISTRAL_TOKENS)}
PARSERS = {
    "qwen": ("hermes (by the chat template)", "think (by the chat template)"),
    "llama": ("llama3_json (by the chat template)", "none (the chat template shows no known form)"),
    "mistral": ("mistral (by the chat template)", "none (the chat template shows no known form)"),
}
QUESTION = [{"role": "user", "content": "How is the weather?"}]


class GetWeather(pydantic.BaseModel):
    """Tells the weather."""

    city: str
    days: int


WEATHER = openai.pydantic_function_tool(GetWeather, name="get_weather")


def write_folder(folder: Path, template: str, tokens: Sequence[str]) -> Path:
    all_tokens = ["<|endoftext|>", "<|im_end|>", *tokens]
    config = {"n_positions": 4096, "vocab_size": 256 + len(all_tokens), "eos_token_id": 257}
    source = template.replace("PARIS", PARIS).replace("ROME", ROME)
    return write_model_folder(folder, config=config, chat_template=source, tokenizer=byte_tokenizer(all_tokens))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(family: str, serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write_folder(tmp_path_factory.mktemp(family) / "model", *FAMILIES[family])
    name = ("--served-model-name", "m")
    with serve(
        str(folder), "--runner", "echo", "--num-kv-blocks", "2048", *name, "--enable-auto-tool-choice"
    ) as running:
        yield running


def ask(server: Any, script: str, **fields: Any) -> Any:
    """One answer, whole and streamed, which must be the same message."""
    arguments = {"model": "m", "messages": QUESTION, "tools": [WEATHER], **fields}
    extra_body = {"chat_template_kwargs": {"script": script}}
    whole = server.client.chat.completions.create(**arguments, extra_body=extra_body)
    with server.client.chat.completions.stream(**arguments, extra_body=extra_body) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert plain(final) == plain(whole)
    check_events(events)
    return whole.choices[0]


def plain(completion: Any) -> Any:
    """The choices without their random ids."""
    choices = completion.model_dump()["choices"]
    for choice in choices:
        message = {key: value for key, value in choice["message"].items() if value not in (None, "", [])}
        message.pop("parsed", None)
        for call in message.get("tool_calls", ()):
            del call["id"]
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        choice["message"] = message
    return [(choice["message"], choice["finish_reason"]) for choice in choices]


def check_events(events: Sequence[ChatCompletionStreamEvent[Any]]) -> None:
    """The client saw the arguments of each call grow."""
    seen: dict[int, str] = {}
    for event in events:
        if event.type == "tool_calls.function.arguments.delta":
            seen[event.index] = seen.get(event.index, "") + event.arguments_delta
            assert event.arguments == seen[event.index]
    done = {event.index: event.arguments for event in events if event.type == "tool_calls.function.arguments.done"}
    assert seen == done


def test_the_server_says_how_it_reads_calls_and_reasoning(server: Any, family: str):
    facts = server.get_json("/server_info")
    assert (facts["tool_call_parser"], facts["reasoning_parser"]) == PARSERS[family]
    assert f"tool_call_parser {PARSERS[family][0]}" in server.log


def test_one_call(server: Any, family: str):
    choice = ask(server, "one")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "get_weather", PARIS)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == ("I look.\n" if family == "qwen" else None)
    assert len(call.id) == (9 if family == "mistral" else 29)


def test_two_calls_at_once(server: Any, family: str):
    choice = ask(server, "two")
    assert [call.function.arguments for call in choice.message.tool_calls] == [PARIS, ROME]
    assert choice.message.content is None
    if family == "qwen":
        assert choice.message.reasoning_content == "Both."


def test_an_answer_without_calls(server: Any, family: str):
    choice = ask(server, "plain")
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert choice.message.content == {"qwen": "Sunny, 日本.", "llama": '{"not": "a call"}', "mistral": "Sunny."}[family]


def test_tokens_of_reasoning_are_counted(server: Any, family: str):
    body = {"messages": QUESTION, "chat_template_kwargs": {"script": "plain"}}
    usage = server.post("/v1/chat/completions", body)[1]["usage"]
    details = {"reasoning_tokens": len("\nHm, é.\n".encode())} if family == "qwen" else None
    assert usage.get("completion_tokens_details") == details


def test_calls_are_parsed_into_the_clients_own_types(server: Any):
    completion = server.client.chat.completions.parse(
        model="m", messages=QUESTION, tools=[WEATHER], extra_body={"chat_template_kwargs": {"script": "two"}}
    )
    parsed = [call.function.parsed_arguments for call in completion.choices[0].message.tool_calls or ()]
    assert parsed == [GetWeather(city="Paris", days=3), GetWeather(city="Rome", days=1)]


def rendered(server: Any, messages: Sequence[Any]) -> str:
    body = {"messages": [message if isinstance(message, dict) else message.model_dump() for message in messages]}
    status, found, _ = server.post("/tokenize", {**body, "tools": [WEATHER]})
    assert status == 200, found
    return str(server.post("/detokenize", {"tokens": found["tokens"]})[1]["prompt"])


def test_results_go_back_to_the_model(server: Any, family: str):
    message = ask(server, "one").message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny <tool_call>"}
    history = [*QUESTION, message, result]
    prompt = rendered(server, history)
    assert f"get_weather{PARIS}" in prompt.replace('", "arguments": ', "").replace('", "parameters": ', "")
    assert prompt.count("sunny <tool_call>") == 1
    assert '"name": "get_weather"' in prompt  # the tool itself
    assert ask(server, "plain", messages=history).finish_reason == "stop"


def test_a_required_call_is_valid_whatever_the_model_would_say(server: Any):
    choice = ask(server, "plain", tool_choice="required", max_tokens=200, parallel_tool_calls=False)
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    if choice.finish_reason == "tool_calls":
        GetWeather.model_validate_json(call.function.arguments)
    else:  # a number that an echo never ends
        assert choice.finish_reason == "length"


def test_a_named_call_is_valid_whatever_the_model_would_say(server: Any):
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(server, "one", tool_choice=named, max_tokens=200)
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert choice.finish_reason in ("stop", "length")
    assert call.function.arguments.startswith("{")


def test_special_tokens_of_calls_are_no_content_without_tools(server: Any, family: str):
    body = {"messages": QUESTION, "chat_template_kwargs": {"script": "one"}}
    status, answer, _ = server.post("/v1/chat/completions", body)
    assert status == 200
    content = answer["choices"][0]["message"]["content"]
    assert PARIS in content
    assert not [token for token in FAMILIES[family][1] if token in content]


def test_the_other_apis_call_too(server: Any):
    tool = {"name": "get_weather", "input_schema": GetWeather.model_json_schema()}
    kwargs = {"chat_template_kwargs": {"script": "two"}}
    body = {"model": "m", "messages": QUESTION, "tools": [tool], "max_tokens": 500, **kwargs}
    status, message, _ = server.post("/v1/messages", body)
    assert (status, message["stop_reason"]) == (200, "tool_use")
    assert [block["input"] for block in message["content"] if block["type"] == "tool_use"] == [
        json.loads(PARIS),
        json.loads(ROME),
    ]
    function = {"type": "function", "name": "get_weather", "parameters": GetWeather.model_json_schema()}
    status, response, _ = server.post("/v1/responses", {"input": "Hi", "tools": [function], **kwargs})
    assert status == 200
    assert [item["arguments"] for item in response["output"] if item["type"] == "function_call"] == [PARIS, ROME]
