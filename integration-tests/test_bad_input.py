"""Bad requests get the contract's answer, leak nothing, and disturb no other stream."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": 2, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 2, **fields}


BAD: list[tuple[str, str, Any, int, str | None, str | None]] = [
    ("not JSON", COMPLETIONS, b"{", 400, None, None),
    ("bad UTF-8", COMPLETIONS, b'{"prompt": "\xff"}', 400, None, None),
    ("NaN", COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, None, None),
    ("infinity", COMPLETIONS, b'{"prompt": "a", "temperature": Infinity}', 400, None, None),
    ("duplicate keys", COMPLETIONS, b'{"prompt": "a", "prompt": "b"}', 400, None, None),
    ("lone surrogate", COMPLETIONS, b'{"prompt": "\\ud800"}', 400, None, None),
    ("deep nesting", COMPLETIONS, b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", 400, None, None),
    ("long integer, malformed", COMPLETIONS, b'{"prompt": ' + b"1" * 5000 + b"} x", 400, None, None),
    ("infinite float", COMPLETIONS, b'{"prompt": "a", "temperature": 1e400}', 400, "decimal_above_max_value", None),
    ("million arrays", COMPLETIONS, b'{"x": [' + b"[]," * 10**6 + b"[]]}", 400, "request_budget_exceeded", None),
    ("many members", COMPLETIONS, b'{"x": {' + b'"":0,' * 10**5 + b'"":0}}', 400, "request_budget_exceeded", None),
    ("not an object", COMPLETIONS, b"[1]", 400, "invalid_type", None),
    ("unknown model", COMPLETIONS, completion(model="x"), 404, "model_not_found", "model"),
    ("no prompt", COMPLETIONS, {"max_tokens": 1}, 400, "missing_required_parameter", "prompt"),
    ("no messages", CHAT, {"max_tokens": 1}, 400, "missing_required_parameter", "messages"),
    ("empty messages", CHAT, {"messages": []}, 400, "empty_array", "messages"),
    ("empty prompt list", COMPLETIONS, completion(prompt=[]), 400, "empty_array", "prompt"),
    ("string temperature", COMPLETIONS, completion(temperature="1"), 400, "invalid_type", "temperature"),
    ("high temperature", COMPLETIONS, completion(temperature=2.5), 400, "decimal_above_max_value", "temperature"),
    ("low temperature", CHAT, chat(temperature=-1), 400, "decimal_below_min_value", "temperature"),
    ("high top_p", COMPLETIONS, completion(top_p=1.5), 400, "decimal_above_max_value", "top_p"),
    ("high penalty", COMPLETIONS, completion(presence_penalty=3), 400, "decimal_above_max_value", "presence_penalty"),
    ("high n", COMPLETIONS, completion(n=130), 400, "integer_above_max_value", "n"),
    ("zero n", CHAT, chat(n=0), 400, "integer_below_min_value", "n"),
    ("low max_tokens", COMPLETIONS, completion(max_tokens=-1), 400, "integer_below_min_value", "max_tokens"),
    ("huge seed", COMPLETIONS, completion(seed=10**400), 400, "integer_above_max_value", "seed"),
    ("many logprobs", COMPLETIONS, completion(logprobs=21), 400, "integer_above_max_value", "logprobs"),
    ("top_logprobs alone", CHAT, chat(top_logprobs=2), 400, "invalid_value", "top_logprobs"),
    ("many stops", COMPLETIONS, completion(stop=["a"] * 17), 400, "array_above_max_length", "stop"),
    ("empty stop", COMPLETIONS, completion(stop=[""]), 400, "string_below_min_length", "stop"),
    ("bias of a word", COMPLETIONS, completion(logit_bias={"fox": 1}), 400, "invalid_value", "logit_bias"),
    (
        "bias past the vocabulary",
        COMPLETIONS,
        completion(logit_bias={"9999999": 1}),
        400,
        "invalid_value",
        "logit_bias",
    ),
    ("id past the vocabulary", COMPLETIONS, completion(prompt=[1, 9999999]), 400, "invalid_value", "prompt[1]"),
    ("negative id", COMPLETIONS, completion(prompt=[[-1]]), 400, "invalid_value", "prompt[0][0]"),
    ("long prompt", COMPLETIONS, completion(prompt=[5] * 100_000), 400, "context_length_exceeded", "prompt"),
    ("long output", COMPLETIONS, completion(max_tokens=10**6), 400, "invalid_value", "max_tokens"),
    ("stream_options alone", COMPLETIONS, completion(stream_options={}), 400, "invalid_value", "stream_options"),
    (
        "image",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        400,
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    ("chat template", CHAT, chat(chat_template="{{ x }}"), 400, "unsupported_parameter", "chat_template"),
]


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_gets_the_answer_of_the_contract(
    demo_server: Any, path: str, body: Any, status: int, code: str | None, param: str | None
) -> None:
    got, answer, headers = demo_server.post(path, body)
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (got, error["code"]) == (status, code), answer
    if param is not None:
        assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert headers["x-request-id"]
    assert len(json.dumps(answer)) <= 2048


def test_a_large_body_is_refused_before_it_is_read(demo_server: Any) -> None:
    host, port = demo_server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.putrequest("POST", COMPLETIONS)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(1 << 30))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "request_too_large"


def test_unknown_paths_methods_and_media_types_are_named(demo_server: Any) -> None:
    assert demo_server.post("/v1/nothing", {})[1]["error"]["code"] == "unknown_url"
    status, answer, headers = demo_server.post("/v1/models", {})
    assert (status, answer["error"]["code"]) == (405, "method_not_supported")
    assert "GET" in headers["allow"]
    status, answer, _ = demo_server.post(COMPLETIONS, b"prompt=1", {"Content-Type": "text/plain"})
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")


def test_a_storm_of_bad_requests_leaks_nothing_and_changes_no_stream(demo_server: Any) -> None:
    client = demo_server.client
    model = client.models.list().data[0].id
    arguments: dict[str, Any] = {"model": model, "prompt": "There was once", "max_tokens": 120, "temperature": 0}
    alone = client.completions.create(**arguments).choices[0].text
    stream = client.completions.create(**arguments, stream=True)
    for _, path, body, status, _, _ in BAD:
        assert demo_server.post(path, body)[0] == status
    assert "".join(chunk.choices[0].text for chunk in stream) == alone
    demo_server.wait_for(lambda: demo_server.metric("llmstack:kv_cache_usage_perc") == 0, "all blocks free")
    assert demo_server.metric("llmstack:num_requests_waiting") == 0
