"""What the server sends, checked against the types of the `openai` package, which OpenAI's schema generates.

Pydantic in strict mode checks names, types and literals. Two things its models do not say: which nullable keys must be
there all the same (the table below, from the schema's `required`), and which keys are not in the schema (our own).
"""

from __future__ import annotations

import copy
import functools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

REQUIRED_THOUGH_NULLABLE = {
    "ChatCompletionMessage": {"content", "refusal"},
    "chat_completion.Choice": {"logprobs", "finish_reason"},
    "chat_completion.ChoiceLogprobs": {"content", "refusal"},
    "chat_completion_chunk.Choice": {"delta", "finish_reason"},
    "chat_completion_chunk.ChoiceLogprobs": {"content", "refusal"},
    "ChatCompletionTokenLogprob": {"bytes"},
    "TopLogprob": {"bytes"},
    "completion_choice.CompletionChoice": {"logprobs", "finish_reason"},
    "completion_choice.Logprobs": {"tokens", "token_logprobs", "top_logprobs", "text_offset"},
    "FunctionTool": {"parameters", "strict"},
    "response.Response": {
        "access_programs", "error", "incomplete_details", "instructions", "metadata", "temperature", "top_p", "tools",
        "tool_choice",
    },
}  # fmt: skip
# What we send beyond OpenAI's schema, as vLLM does.
OUR_KEYS = {
    "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs", "reasoning_content", "reasoning", "service_tier",
    "system_fingerprint", "root", "store", "parent", "max_model_len", "permission", "kv_transfer_params",
    "chat",
    "speech",
}  # fmt: skip
# The same for single types: OpenAI sends the bytes with a whole response's log-probabilities and leaves them out of its
# stream, and has sent the name at the end of a call's arguments.
OUR_KEYS_OF = {
    "Logprob": {"bytes"}, "LogprobTopLogprob": {"bytes"}, "ResponseFunctionCallArgumentsDoneEvent": {"name"},
}  # fmt: skip

HELLO = [{"role": "user", "content": "Tell me about a fox."}]
FIELDS = {"is_fox": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["is_fox"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "look"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
COMPLETION_CASES: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": 3, "echo": True},
    {"logprobs": 0},
    {"prompt": ["The fox", "The crow"], "best_of": 2, "temperature": 1},
    {"stop": "e"},
    {"max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": [[1, 2, 3], [4]], "return_token_ids": True},
    {"prompt_logprobs": 1},
]
WHOLE_ONLY = {"best_of", "prompt_logprobs"}  # known at the end only
CHAT_CASES: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 2},
    {"logprobs": True},
    {"stop": ["e", "a"]},
    {"max_completion_tokens": 3, "max_tokens": None},
    {"return_token_ids": True},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    {"tools": [TOOL], "tool_choice": "required", "max_tokens": 300, "seed": 1},
    {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 300, "logprobs": True, "n": 2},
    {"tools": [TOOL], "tool_choice": "none"},
    {"response_format": FORMAT, "max_tokens": 200},
]
RESPONSE_CASES: list[dict[str, Any]] = [
    {},
    {"instructions": "Be brief.", "metadata": {"a": "b"}},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}], "tool_choice": "required",
     "max_output_tokens": 300},
    {"text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}},
     "max_output_tokens": 200},
]  # fmt: skip
BAD_BODIES = [
    ("/v1/completions", {"prompt": "x", "n": 1000}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}),
    ("/v1/completions", {"prompt": "x", "model": "nobody"}),
    ("/v1/completions", b"{"),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {}),
    ("/v1/embeddings", {}),
    ("/v1/responses", {}),
    ("/v1/nothing", {}),
]


def ask(url: str, path: str, body: Any = None) -> tuple[int, bytes]:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def answer(url: str, path: str, body: Any) -> Any:
    status, content = ask(url, path, body)
    assert status == 200, content
    return json.loads(content)


def events(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    status, content = ask(url, path, {**body, "stream": True})
    assert status == 200, content
    assert content.endswith(b"\n\n")
    lines = [line for line in content.decode().split("\n") if line.startswith("data: ")]
    if path != "/v1/responses":
        assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def parts(value: Any) -> Iterator[BaseModel]:
    """A model and every model inside it."""
    if isinstance(value, BaseModel):
        yield value
        for name in value.model_fields_set:
            yield from parts(getattr(value, name, None))
    elif isinstance(value, list):
        for entry in value:
            yield from parts(entry)


def required_of(part: BaseModel) -> set[str]:
    name, module = type(part).__name__, type(part).__module__.rpartition(".")[2]
    return REQUIRED_THOUGH_NULLABLE.get(name, set()) | REQUIRED_THOUGH_NULLABLE.get(f"{module}.{name}", set())


@functools.cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Made once: that of all events takes 50 ms, and a streamed answer has dozens of events."""
    return TypeAdapter(kind)


def check(kind: Any, value: Any) -> None:
    """Fails where `value` is not what the schema's `kind` allows."""
    found = adapter_of(kind).validate_json(json.dumps(value), strict=True)
    for part in parts(found):
        missing = required_of(part) - part.model_fields_set
        assert not missing, f"{type(part).__name__} lacks {missing}: {value}"
        unknown = set(part.model_extra or {}) - OUR_KEYS - OUR_KEYS_OF.get(type(part).__name__, set())
        assert not unknown, f"{type(part).__name__} has {unknown}, which nobody defines: {value}"


def check_completion(value: Any, *, is_chunk: bool = False) -> None:
    """As `check`, but for two things that OpenAI's API does and its schema does not say.

    A prompt's first token has no log-probability, and until its last chunk a choice has no reason to be finished.
    """
    value = copy.deepcopy(value)
    for choice in value["choices"]:
        if is_chunk and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        logprobs = choice["logprobs"] or {"token_logprobs": []}
        if logprobs["token_logprobs"][:1] == [None]:
            assert logprobs["top_logprobs"][:1] == [None]
            logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    check(Completion, value)


@pytest.mark.parametrize("case", COMPLETION_CASES, ids=str)
def test_completions_are_of_the_schema(demo_server: Any, case: dict[str, Any]) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, **case}
    check_completion(answer(demo_server.url, "/v1/completions", body))
    if WHOLE_ONLY & case.keys():
        return
    for options in ({}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        chunks = events(demo_server.url, "/v1/completions", {**body, "stream_options": options})
        assert chunks
        for chunk in chunks:
            check_completion(chunk, is_chunk=True)


@pytest.mark.parametrize("case", CHAT_CASES, ids=str)
def test_chat_completions_are_of_the_schema(demo_server: Any, case: dict[str, Any]) -> None:
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, **case}
    check(ChatCompletion, answer(demo_server.url, "/v1/chat/completions", body))
    for options in ({}, {"include_usage": True}):
        chunks = events(demo_server.url, "/v1/chat/completions", {**body, "stream_options": options})
        assert chunks
        for chunk in chunks:
            check(ChatCompletionChunk, chunk)


@pytest.mark.parametrize("case", RESPONSE_CASES, ids=str)
def test_responses_are_of_the_schema(demo_server: Any, case: dict[str, Any]) -> None:
    body = {"input": "Tell me about a fox.", "max_output_tokens": 16, "temperature": 0, **case}
    check(Response, answer(demo_server.url, "/v1/responses", body))
    found = events(demo_server.url, "/v1/responses", body)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        check(ResponseStreamEvent, event)


def test_embeddings_are_of_the_schema(demo_server: Any) -> None:
    for case in ({"input": "a fox"}, {"input": ["a", "b"], "dimensions": 8}):
        check(CreateEmbeddingResponse, answer(demo_server.url, "/v1/embeddings", case))


def test_models_are_of_the_schema(demo_server: Any) -> None:
    listed = json.loads(ask(demo_server.url, "/v1/models")[1])
    assert listed["object"] == "list"
    for entry in listed["data"]:
        check(Model, entry)
        check(Model, json.loads(ask(demo_server.url, f"/v1/models/{entry['id']}")[1]))


@pytest.mark.parametrize(("path", "body"), BAD_BODIES, ids=str)
def test_errors_are_of_the_schema(demo_server: Any, path: str, body: Any) -> None:
    status, content = ask(demo_server.url, path, body)
    assert 400 <= status < 500
    error = json.loads(content)
    assert error.keys() == {"error"}
    assert error["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(error["error"]["message"], str)
    assert isinstance(error["error"]["type"], str)
    assert all(isinstance(error["error"][name], str | None) for name in ("param", "code"))


def test_the_check_finds_what_is_wrong() -> None:
    good = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None,
                     "message": {"role": "assistant", "content": "x", "refusal": None}}],
    }  # fmt: skip
    check(ChatCompletion, good)
    choice = good["choices"][0]  # type: ignore[index]
    for wrong in (
        {**good, "object": "text_completion"},
        {**good, "created": "1"},
        {**good, "nonsense": 1},
        {**good, "choices": [{**choice, "finish_reason": "enough"}]},
        {**good, "choices": [{name: value for name, value in choice.items() if name != "logprobs"}]},
        {**good, "choices": [{**choice, "message": {"role": "assistant", "content": "x"}}]},
    ):
        with pytest.raises((AssertionError, ValueError)):
            check(ChatCompletion, wrong)
