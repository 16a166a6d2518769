"""The error contract, row by row: status, type, code, param, headers; the bodies keep one shape."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_helpers.engines import either_engine

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_server.web.errors import answer_to
from llmstack_types import (
    EngineDeadError,
    InvalidRequestError,
    NoTokenAllowedError,
    NumericalError,
    QuarantinedError,
    RequestFailedError,
    ServerOverloadedError,
    TenantLimitError,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": 2, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 2, **fields}


def part(**fields: Any) -> dict[str, Any]:
    return chat(messages=[USER, {"role": "user", "content": [{"type": "text", "text": "a"}, fields]}])


ROWS: list[tuple[str, Any, int, str | None, str | None]] = [
    (COMPLETIONS, b"{", 400, None, None),
    (COMPLETIONS, b"", 400, None, None),
    (COMPLETIONS, b'{"prompt": "\xff"}', 400, None, None),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, None, None),
    (COMPLETIONS, b'{"prompt": "a", "temperature": -Infinity}', 400, None, None),
    (COMPLETIONS, b'{"prompt": "a", "prompt": "b"}', 400, None, None),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None, None),
    (COMPLETIONS, b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", 400, None, None),
    (COMPLETIONS, b'{"prompt": ' + b"[" * 100_000, 400, None, None),
    (COMPLETIONS, b'{"prompt": ' + b"1" * 5000 + b"} x", 400, None, None),
    (COMPLETIONS, b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", 400, "integer_above_max_value", "seed"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": 1e400}', 400, "decimal_above_max_value", "temperature"),
    (COMPLETIONS, b'{"prompt": [' + b"[]," * 100_000 + b"[]]}", 400, "request_budget_exceeded", None),
    (COMPLETIONS, b"[1]", 400, "invalid_type", None),
    (COMPLETIONS, b"null", 400, "invalid_type", None),
    (COMPLETIONS, completion(model="x"), 404, "model_not_found", "model"),
    (COMPLETIONS, completion(model=3), 400, "invalid_type", "model"),
    (COMPLETIONS, completion(model="x", temperature="1"), 400, "invalid_type", "temperature"),
    (COMPLETIONS, completion(model="x", temperature=9), 404, "model_not_found", "model"),
    (COMPLETIONS, {"model": "x"}, 400, "missing_required_parameter", "prompt"),
    (CHAT, {"model": "x"}, 400, "missing_required_parameter", "messages"),
    (COMPLETIONS, {"max_tokens": 1}, 400, "missing_required_parameter", "prompt"),
    (COMPLETIONS, completion(prompt=None, prompt_embeds=[]), 400, "missing_required_parameter", "prompt"),
    (COMPLETIONS, completion(prompt_embeds="AAA"), 400, "unsupported_parameter", "prompt_embeds"),
    (COMPLETIONS, completion(prompt=[]), 400, "empty_array", "prompt"),
    (COMPLETIONS, completion(prompt=[[]]), 400, "empty_array", "prompt[0]"),
    (COMPLETIONS, completion(prompt=7), 400, "invalid_type", "prompt"),
    (COMPLETIONS, completion(prompt=[[1], "a"]), 400, "invalid_type", "prompt[1]"),
    (COMPLETIONS, completion(prompt=["a", 1]), 400, "invalid_type", "prompt[1]"),
    (COMPLETIONS, completion(prompt=[1, True]), 400, "invalid_value", "prompt[1]"),
    (COMPLETIONS, completion(prompt=[[1, 2.0]]), 400, "invalid_value", "prompt[0][1]"),
    (COMPLETIONS, completion(prompt=[1, 9999]), 400, "invalid_value", "prompt[1]"),
    (COMPLETIONS, completion(prompt=[[1], [10**30]]), 400, "invalid_value", "prompt[1][0]"),
    (COMPLETIONS, completion(prompt=[-1]), 400, "invalid_value", "prompt[0]"),
    (COMPLETIONS, completion(prompt=[5] * 200), 400, "context_length_exceeded", "prompt"),
    (COMPLETIONS, completion(prompt="x" * 500), 400, "context_length_exceeded", "prompt"),
    (COMPLETIONS, completion(prompt=["a"] * 1000, n=2), 400, "request_budget_exceeded", "prompt"),
    (COMPLETIONS, completion(prompt="x" * 120, max_tokens=20), 400, "context_length_exceeded", "prompt"),
    (COMPLETIONS, completion(max_tokens=10**6), 400, "invalid_value", "max_tokens"),
    (COMPLETIONS, completion(max_tokens=1e308), 400, "invalid_type", "max_tokens"),
    (COMPLETIONS, completion(max_tokens=0), 400, "integer_below_min_value", "max_tokens"),
    (COMPLETIONS, completion(temperature="1"), 400, "invalid_type", "temperature"),
    (COMPLETIONS, completion(temperature=True), 400, "invalid_type", "temperature"),
    (COMPLETIONS, completion(temperature=2.1), 400, "decimal_above_max_value", "temperature"),
    (COMPLETIONS, completion(temperature=10**400), 400, "decimal_above_max_value", "temperature"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}', 400, "decimal_above_max_value", "temperature"),
    (COMPLETIONS, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "integer_above_max_value", "seed"),
    (CHAT, chat(temperature=-1), 400, "decimal_below_min_value", "temperature"),
    (COMPLETIONS, completion(top_p=1.5), 400, "decimal_above_max_value", "top_p"),
    (COMPLETIONS, completion(top_p=0), 400, "decimal_below_min_value", "top_p"),
    (COMPLETIONS, completion(top_k=-2), 400, "integer_below_min_value", "top_k"),
    (COMPLETIONS, completion(min_p=1.1), 400, "decimal_above_max_value", "min_p"),
    (COMPLETIONS, completion(typical_p=0), 400, "decimal_below_min_value", "typical_p"),
    (COMPLETIONS, completion(bad_words="a"), 400, "invalid_type", "bad_words"),
    (CHAT, chat(bad_words=[1]), 400, "invalid_type", "bad_words[0]"),
    (CHAT, chat(bad_words=[""]), 400, "string_below_min_length", "bad_words"),
    (COMPLETIONS, completion(bad_words=["a"] * 129), 400, "array_above_max_length", "bad_words"),
    (COMPLETIONS, completion(vllm_xargs=[]), 400, "invalid_type", "vllm_xargs"),
    (COMPLETIONS, completion(vllm_xargs={"a": {}}), 400, "invalid_type", "vllm_xargs.a"),
    (CHAT, chat(vllm_xargs={"a": 2**64}), 400, "invalid_value", "vllm_xargs.a"),
    (COMPLETIONS, completion(presence_penalty=3), 400, "decimal_above_max_value", "presence_penalty"),
    (COMPLETIONS, completion(frequency_penalty=-3), 400, "decimal_below_min_value", "frequency_penalty"),
    (COMPLETIONS, completion(repetition_penalty=0), 400, "decimal_below_min_value", "repetition_penalty"),
    (COMPLETIONS, completion(n=130), 400, "integer_above_max_value", "n"),
    (CHAT, chat(n=0), 400, "integer_below_min_value", "n"),
    (CHAT, chat(n=1.5), 400, "invalid_type", "n"),
    (COMPLETIONS, completion(best_of=21), 400, "integer_above_max_value", "best_of"),
    (COMPLETIONS, completion(best_of=1, n=2), 400, "invalid_value", "best_of"),
    (
        COMPLETIONS,
        completion(best_of=3, temperature=0),
        400,
        "invalid_value",
        "best_of",
    ),  # all the same
    (COMPLETIONS, completion(best_of=3, temperature=1, stream=True), 400, "invalid_value", "best_of"),
    (CHAT, chat(best_of=1, n=2), 400, "invalid_value", "best_of"),
    (CHAT, chat(best_of="2"), 400, "invalid_type", "best_of"),
    (COMPLETIONS, completion(prompt=["a"] * 600, best_of=2, temperature=1), 400, "request_budget_exceeded", "prompt"),
    (COMPLETIONS, completion(use_beam_search=True, stream=True), 400, "invalid_value", "use_beam_search"),
    (CHAT, chat(use_beam_search=True, stream=True), 400, "invalid_value", "use_beam_search"),
    (COMPLETIONS, completion(use_beam_search=True, n=2, best_of=3), 400, "invalid_value", "best_of"),
    (COMPLETIONS, completion(use_beam_search=True, temperature=0.7), 400, "invalid_value", "temperature"),
    (COMPLETIONS, completion(use_beam_search=True, top_p=0.5), 400, "invalid_value", "top_p"),
    (COMPLETIONS, completion(use_beam_search=True, stop="a"), 400, "invalid_value", "stop"),
    (COMPLETIONS, completion(use_beam_search=True, logit_bias={"1": 1}), 400, "invalid_value", "logit_bias"),
    (CHAT, chat(use_beam_search=True, prompt_logprobs=1), 400, "invalid_value", "prompt_logprobs"),
    (COMPLETIONS, completion(length_penalty=11), 400, "decimal_above_max_value", "length_penalty"),
    (COMPLETIONS, completion(use_beam_search=True, early_stopping="now"), 400, "invalid_value", "early_stopping"),
    (COMPLETIONS, completion(length_penalty=2), 400, "invalid_value", "length_penalty"),
    (COMPLETIONS, completion(early_stopping=True), 400, "invalid_value", "early_stopping"),
    (COMPLETIONS, completion(logprobs=21), 400, "integer_above_max_value", "logprobs"),
    (COMPLETIONS, completion(logprobs=True), 400, "invalid_type", "logprobs"),
    (COMPLETIONS, completion(prompt_logprobs=-1), 400, "integer_below_min_value", "prompt_logprobs"),
    (COMPLETIONS, completion(prompt_logprobs=1, stream=True), 400, "invalid_value", "prompt_logprobs"),
    (CHAT, chat(top_logprobs=2), 400, "invalid_value", "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "integer_above_max_value", "top_logprobs"),
    (CHAT, chat(logprobs=2), 400, "invalid_type", "logprobs"),
    (CHAT, chat(max_completion_tokens=-1), 400, "integer_below_min_value", "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=10**6), 400, "invalid_value", "max_completion_tokens"),
    (COMPLETIONS, completion(seed=2**63), 400, "integer_above_max_value", "seed"),
    (COMPLETIONS, completion(seed=-(10**400)), 400, "integer_below_min_value", "seed"),
    (COMPLETIONS, completion(stop=["a"] * 17), 400, "array_above_max_length", "stop"),
    (COMPLETIONS, completion(stop=""), 400, "string_below_min_length", "stop"),
    (COMPLETIONS, completion(stop="x" * 2000), 400, "string_above_max_length", "stop"),
    (COMPLETIONS, completion(stop=[1]), 400, "invalid_type", "stop"),
    (COMPLETIONS, completion(logit_bias={"fox": 1}), 400, "invalid_value", "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"9999": 1}), 400, "invalid_value", "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"1": 101}), 400, "invalid_value", "logit_bias"),
    (COMPLETIONS, completion(logit_bias=[1]), 400, "invalid_type", "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"1": "a"}), 400, "invalid_type", "logit_bias.1"),
    (
        COMPLETIONS,
        completion(logit_bias={str(i): 1 for i in range(1025)}),
        400,
        "object_above_max_properties",
        "logit_bias",
    ),
    (COMPLETIONS, completion(stop_token_ids=["a"]), 400, "invalid_type", "stop_token_ids[0]"),
    (COMPLETIONS, completion(stop_token_ids=[9999]), 400, "invalid_value", "stop_token_ids[0]"),
    (COMPLETIONS, completion(allowed_token_ids=[]), 400, "empty_array", "allowed_token_ids"),
    (COMPLETIONS, completion(min_tokens=3), 400, "invalid_value", "min_tokens"),
    (COMPLETIONS, completion(priority=10**30), 400, "integer_above_max_value", "priority"),
    (COMPLETIONS, completion(cache_salt="x" * 129), 400, "string_above_max_length", "cache_salt"),
    (COMPLETIONS, completion(stream="yes"), 400, "invalid_type", "stream"),
    (COMPLETIONS, completion(stream_options={}), 400, "invalid_value", "stream_options"),
    (COMPLETIONS, completion(stream_options={"include_usage": None}), 400, "invalid_value", "stream_options"),
    (COMPLETIONS, completion(stream=True, stream_options=1), 400, "invalid_type", "stream_options"),
    (
        COMPLETIONS,
        completion(stream=True, stream_options={"include_usage": 1}),
        400,
        "invalid_type",
        "stream_options.include_usage",
    ),
    (COMPLETIONS, completion(lora_request="x"), 400, "unsupported_parameter", "lora_request"),
    (COMPLETIONS, completion(suffix="end"), 400, "unsupported_parameter", "suffix"),
    (COMPLETIONS, completion(response_format={}), 400, "missing_required_parameter", "response_format.type"),
    (COMPLETIONS, completion(response_format=[]), 400, "invalid_type", "response_format"),
    (COMPLETIONS, completion(guided_regex=1), 400, "invalid_type", "guided_regex"),
    (COMPLETIONS, completion(structured_outputs={}), 400, "invalid_value", "structured_outputs"),
    (COMPLETIONS, completion(structured_outputs={"x": 1}), 400, "unsupported_parameter", "structured_outputs.x"),
    (COMPLETIONS, completion(guided_choice=[]), 400, "invalid_value", "guided_choice"),
    (CHAT, {"max_tokens": 1}, 400, "missing_required_parameter", "messages"),
    (CHAT, chat(messages="hi"), 400, "invalid_type", "messages"),
    (CHAT, chat(messages=[USER, 3]), 400, "invalid_type", "messages[1]"),
    (CHAT, chat(tools=[]), 400, "empty_array", "tools"),
    (CHAT, chat(chat_template="{{ x }}"), 400, "unsupported_parameter", "chat_template"),
    (CHAT, chat(modalities=["audio"]), 400, "unsupported_parameter", "modalities"),
    ("/tokenize", {}, 400, "missing_required_parameter", "prompt"),
    ("/detokenize", {"tokens": [9999]}, 400, "invalid_value", "tokens[0]"),
    ("/detokenize", {"tokens": [1] * 65_537}, 400, "array_above_max_length", "tokens"),
]
# What only the real front end checks.
FRONT_END_ROWS: list[tuple[str, Any, int, str | None, str | None]] = [
    (CHAT, chat(messages=[]), 400, "empty_array", "messages"),
    (CHAT, chat(messages=[{"content": "a"}]), 400, "missing_required_parameter", "messages[0].role"),
    (CHAT, chat(messages=[USER, {"role": "user"}]), 400, "missing_required_parameter", "messages[1].content"),
    (CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, "invalid_type", "messages[0].content"),
    (
        CHAT,
        part(type="image_url", image_url={"url": "data:,"}),
        400,
        "unsupported_parameter",
        "messages[1].content[1].type",
    ),
    (CHAT, part(type="nonsense"), 400, "invalid_value", "messages[1].content[1].type"),
    (CHAT, part(type="text", text=3), 400, "invalid_type", "messages[1].content[1].text"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 500}]), 400, "context_length_exceeded", "messages"),
    (CHAT, chat(chat_template_kwargs={"a": {}}), 400, "invalid_type", "chat_template_kwargs.a"),
    (CHAT, chat(chat_template_kwargs={"messages": 1}), 400, "invalid_value", "chat_template_kwargs.messages"),
    (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        400,
        "invalid_value",
        "continue_final_message",
    ),
]


@pytest.fixture(params=["fake", "async_llm"])
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    async with either_engine(request.param, tmp_path) as app:
        yield app


def check(answer: Answer, status: int, kind: str, code: str | None, param: str | None) -> dict[str, Any]:
    body = answer.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}, body
    assert (answer.status, body["error"]["type"], body["error"]["code"]) == (status, kind, code), body
    assert body["error"]["param"] == param, body
    assert body["error"]["message"]
    assert answer.headers["x-request-id"]
    assert len(answer.body) <= 2048
    return body["error"]


async def test_every_row_of_the_contract_has_its_answer(app: Any):
    for path, body, status, code, param in ROWS:
        check(await call(app, "POST", path, body), status, "invalid_request_error", code, param)
    assert (await call(app, "POST", COMPLETIONS, completion())).status == 200


@pytest.mark.parametrize("app", ["async_llm"], indirect=True)
async def test_conversations_have_their_rows_too(app: Any):
    for path, body, status, code, param in FRONT_END_ROWS:
        check(await call(app, "POST", path, body), status, "invalid_request_error", code, param)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (completion(prompt=[9999]), "out of vocabulary"),
        (completion(seed=2**64), "less_than_equal"),
        (completion(seed=-(2**64)), "greater_than_equal"),
        (completion(prompt=None, prompt_embeds=[]), "Either prompt or prompt_embeds must be provided and non-empty."),
        (completion(model="nobody"), "The model `nobody` does not exist. Available models: `fake`."),
        (completion(prompt="x" * 500), "This model's maximum context length is"),
        (completion(n=130), "integer above maximum value. Expected a value <= 128, but got 130 instead."),
    ],
)
async def test_messages_hold_the_words_that_clients_look_for(app: Any, body: Any, words: str):
    assert words in (await call(app, "POST", COMPLETIONS, body)).json()["error"]["message"]


async def test_unknown_paths_and_methods_are_named(app: Any):
    check(await call(app, "GET", "/v1/nothing"), 404, "invalid_request_error", "unknown_url", None)
    for path, meant in (("/chat/completions", CHAT), ("/models", "/v1/models"), ("/v1/v1/completions", COMPLETIONS)):
        message = (await call(app, "POST", path)).json()["error"]["message"]
        assert message == f"Unknown request URL: POST {path}. Did you mean {meant}?"
    assert (await call(app, "GET", "/v1/nothing")).json()["error"]["message"] == "Unknown request URL: GET /v1/nothing."
    check(await call(app, "POST", "/v1/completions/"), 404, "invalid_request_error", "unknown_url", None)
    answer = await call(app, "GET", COMPLETIONS)
    check(answer, 405, "invalid_request_error", "method_not_supported", None)
    assert answer.headers["allow"] == "POST"
    check(await call(app, "GET", "/v1/models/nobody"), 404, "invalid_request_error", "model_not_found", "model")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": ""},
        {"content-encoding": "gzip"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/x-www-form-urlencoded"},
    ],
)
async def test_other_media_types_are_refused(app: Any, headers: dict[str, str]):
    answer = await call(app, "POST", COMPLETIONS, completion(), headers)
    check(answer, 415, "invalid_request_error", "unsupported_media_type", None)


async def test_hostile_input_is_echoed_short_and_on_one_line(app: Any):
    answer = await call(app, "POST", COMPLETIONS, completion(model="a\n\x00" + "é" * 10_000))
    error = check(answer, 404, "invalid_request_error", "model_not_found", "model")
    assert "\n" not in error["message"]
    answer = await call(app, "POST", COMPLETIONS, completion(logit_bias={"\n" + "é" * 5000: "x"}))
    assert len(answer.body) <= 2048


async def test_strict_params_refuse_unknown_fields():
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(is_strict_params=True)))
    answer = await call(app, "POST", COMPLETIONS, completion(extra_field=1))
    check(answer, 400, "invalid_request_error", "unknown_parameter", "extra_field")
    assert (await call(app, "POST", COMPLETIONS, completion(use_beam_search=False))).status == 200


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "header"),
    [
        (ServerOverloadedError("full"), 503, "service_unavailable_error", "server_is_overloaded", "retry-after-ms"),
        (TenantLimitError("Later.", wait_s=3.2), 429, "rate_limit_error", "rate_limit_exceeded", "retry-after-ms"),
        (EngineDeadError("gone"), 503, "service_unavailable_error", "engine_unavailable", "retry-after"),
        (NoTokenAllowedError(), 400, "invalid_request_error", "invalid_value", "x-request-id"),
        (NumericalError(), 500, "server_error", "numerical_error", "x-should-retry"),
        (
            QuarantinedError(QuarantinedError.OUT_OF_MEMORY),
            500,
            "server_error",
            "request_quarantined",
            "x-should-retry",
        ),
        (QuarantinedError("/secret/path"), 500, "server_error", "request_quarantined", "x-should-retry"),
        (RequestFailedError("/secret/path"), 500, "server_error", "internal_error", "x-should-retry"),
        (ZeroDivisionError("/secret/path"), 500, "server_error", "internal_error", "x-should-retry"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_byte_have_a_status(
    error: Exception, status: int, kind: str, code: str, header: str, stream: bool
):
    engine = FakeEngineClient()
    engine.error = error
    answer = await call(build_app(ready_state(engine)), "POST", COMPLETIONS, completion(stream=stream))
    check(answer, status, kind, code, None)
    assert header in answer.headers
    assert b"secret" not in answer.body


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_failures_after_the_first_byte_are_the_last_event(path: str):
    engine = FakeEngineClient()
    engine.error, engine.num_tokens_before_error = EngineDeadError("gone"), 2
    body = {**completion(), **chat(), "stream": True, "max_tokens": 5}
    events = (await call(build_app(ready_state(engine)), "POST", path, body)).events()
    assert events[-1]["error"]["code"] == "engine_unavailable"
    assert "[DONE]" not in events
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])


async def test_a_bug_is_logged_with_the_request_id(caplog: pytest.LogCaptureFixture):
    engine = FakeEngineClient()
    engine.error = ZeroDivisionError("boom")
    with caplog.at_level(logging.ERROR):
        answer = await call(build_app(ready_state(engine)), "POST", COMPLETIONS, completion(), {"x-request-id": "me-1"})
    assert answer.json()["error"]["message"] == "Internal error"
    assert answer.headers["x-request-id"] == "me-1"
    assert "me-1" in caplog.text
    assert "boom" in caplog.text


def test_no_answer_is_longer_than_two_kibibytes():
    answer = answer_to(InvalidRequestError("é" * 100_000, param="x", code="invalid_value"), "id")
    assert len(json.dumps(answer.body(), ensure_ascii=False)) <= 2048
