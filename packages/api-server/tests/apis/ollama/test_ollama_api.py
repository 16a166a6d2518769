"""`/api/…` over the fake engine: answers, streams and errors in Ollama's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.app import build_app
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_server.testing.adapters import write_adapter
from llmstack_server.web import keep_alive
from llmstack_types import RequestFailedError

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "Hello"}]
SEVEN = {"num_predict": 7}


@pytest.fixture(scope="module")
def shared_app() -> Any:
    return build_app(ready_state(FakeEngineClient()))


async def post(app: Any, path: str, **fields: Any) -> Answer:
    return await call(app, "POST", path, {"model": "fake", **fields})


def lines_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.decode().splitlines()]


async def test_a_chat_is_answered_whole(app: Any) -> None:
    answer = (await post(app, CHAT, messages=HELLO, options=SEVEN, stream=False)).json()
    assert answer["message"] == {"role": "assistant", "content": "HelloHe"}
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("fake", True, "length")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (5, 7)
    assert answer["created_at"].endswith("Z")
    assert answer["total_duration"] >= answer["eval_duration"] >= 0 == answer["load_duration"]


async def test_a_stream_is_the_default_and_comes_in_lines(app: Any) -> None:
    *parts, last = lines_of(await post(app, CHAT, messages=HELLO, options=SEVEN))
    assert "".join(part["message"]["content"] for part in parts) == "HelloHe"
    assert [part["done"] for part in parts] == [False] * len(parts)
    assert not any("eval_count" in part for part in parts)
    assert (last["message"]["content"], last["done"], last["done_reason"]) == ("", True, "length")
    assert (last["prompt_eval_count"], last["eval_count"]) == (5, 7)


@given(st.text("ab c", min_size=1, max_size=12), st.integers(1, 20), st.sampled_from([CHAT, GENERATE]))
async def test_any_answer_says_the_same_streamed_and_whole(shared_app: Any, text: str, length: int, path: str) -> None:
    asked: dict[str, Any] = {"prompt": text} if path == GENERATE else {"messages": [{"role": "user", "content": text}]}
    whole = (await post(shared_app, path, **asked, options={"num_predict": length}, stream=False)).json()
    *parts, last = lines_of(await post(shared_app, path, **asked, options={"num_predict": length}))

    def text_of(part: dict[str, Any]) -> str:
        return str(part["response"] if path == GENERATE else part["message"]["content"])

    assert "".join(map(text_of, [*parts, last])) == text_of(whole)
    assert last.keys() == whole.keys()
    same = ("model", "done_reason", "prompt_eval_count", "eval_count")
    assert [last[name] for name in same] == [whole[name] for name in same]


@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": HELLO}), (GENERATE, {"prompt": "Hello"})])
@pytest.mark.parametrize("num_top", [None, 0, 2])
async def test_each_token_has_a_log_probability(
    app: Any, path: str, asked: dict[str, Any], num_top: int | None
) -> None:
    asked = {**asked, "options": SEVEN, "logprobs": True, "top_logprobs": num_top}
    whole = (await post(app, path, **asked, stream=False)).json()["logprobs"]
    lines = lines_of(await post(app, path, **asked))
    assert [entry for line in lines for entry in line.get("logprobs", [])] == whole
    assert "".join(entry["token"] for entry in whole) == "HelloHe"
    assert [entry["bytes"] for entry in whole] == [list(entry["token"].encode()) for entry in whole]
    assert all(entry["logprob"] <= 0 for entry in whole)
    assert [len(entry["top_logprobs"]) for entry in whole] == [num_top or 0] * 7


async def test_tokens_of_a_call_have_log_probabilities_too() -> None:
    engine = FakeEngineClient()
    app = build_app(ready_state(engine, HTTPConfig(), chat=ChatOptions(tool_call_parser="hermes")))
    said = engine.script = 'Well.<tool_call>{"name": "tea", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "tea", "parameters": {"type": "object"}}}]
    asked = {"messages": HELLO, "tools": tools, "options": {"num_predict": len(said)}, "logprobs": True}
    lines = lines_of(await post(app, CHAT, **asked))
    assert "".join(entry["token"] for line in lines for entry in line.get("logprobs", [])) == said


async def test_without_log_probabilities_no_number_of_them_has_an_effect(app: Any) -> None:
    answer = await post(app, CHAT, messages=HELLO, options=SEVEN, stream=False, top_logprobs=3)
    assert (answer.status, "logprobs" in answer.json()) == (200, False)


async def test_a_prompt_is_a_question_after_its_instructions(app: Any, engine: FakeEngineClient) -> None:
    answer = (await post(app, GENERATE, prompt="Hi", system="Be brief.", options=SEVEN, stream=False)).json()
    assert answer["response"] == "Be brie"
    assert engine.admitted[-1].prompt == "Be brief.\nHi"


async def test_a_raw_prompt_is_continued_as_it_is(app: Any, engine: FakeEngineClient) -> None:
    answer = (await post(app, GENERATE, prompt="Hi", raw=True, options=SEVEN, stream=False)).json()
    assert answer["response"] == "HiHiHiH"
    refused = await post(app, GENERATE, prompt="Hi", raw=True, system="Be brief.")
    assert (refused.status, "'system'" in refused.json()["error"]) == (400, True)
    assert len(engine.admitted) == 1


async def test_options_are_sampling_fields(app: Any, engine: FakeEngineClient) -> None:
    options = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.7, "seed": 4, "stop": ["x"],
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "repeat_penalty": 1.2, "repeat_last_n": -1,
        "num_predict": 2, "num_ctx": 4096, "num_gpu": 1, "mirostat": 0, "no_such_option": 1,
    }  # fmt: skip
    assert (await post(app, CHAT, messages=HELLO, options=options, stream=False)).status == 200
    params = engine.admitted[-1].sampling_params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (0.5, 3, 0.9, 0.1, 0.7)
    assert (params.seed, list(params.stop or ()), params.max_tokens) == (4, ["x"], 2)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, 0.3, 1.2)


@pytest.mark.parametrize("length", [-1, -2])
async def test_a_negative_length_is_all_that_fits(app: Any, engine: FakeEngineClient, length: int) -> None:
    await post(app, CHAT, messages=HELLO, stream=False)
    await post(app, CHAT, messages=HELLO, stream=False, options={"num_predict": length})
    unlimited, negative = (one.sampling_params.max_tokens for one in engine.admitted)
    assert unlimited == negative


@pytest.mark.parametrize(
    ("format", "kind"), [("json", "json_object"), ({"type": "object", "properties": {"a": {"type": "string"}}}, "json")]
)
async def test_a_format_is_a_constraint(app: Any, engine: FakeEngineClient, format: Any, kind: str) -> None:
    assert (await post(app, CHAT, messages=HELLO, options=SEVEN, format=format)).status == 200
    form = engine.admitted[-1].sampling_params.structured_outputs
    assert form is not None
    assert getattr(form, kind) == (True if kind == "json_object" else json.dumps(format))


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"messages": HELLO, "options": {"temperature": 3}}, "options.temperature"),
        (CHAT, {"messages": HELLO, "options": {"repeat_penalty": 1.1}}, "options.repeat_penalty"),
        (CHAT, {"messages": HELLO, "options": {"mirostat": 2}}, "options.mirostat"),
        (CHAT, {"messages": HELLO, "options": {"top_k": "3"}}, "options.top_k"),
        (CHAT, {"messages": HELLO, "format": "yaml"}, "format"),
        (CHAT, {"messages": HELLO, "think": "very"}, "think"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": "abc"}]}, "messages[0].images"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": [3]}]}, "messages[0].images[0]"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (GENERATE, {"prompt": "x", "logprobs": 1}, "logprobs"),
        (GENERATE, {"prompt": "x", "context": [1, 2]}, "context"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix"),
        (GENERATE, {"prompt": 3}, "prompt"),
        (CHAT, {"messages": HELLO, "model": "other"}, "other"),
        ("/api/embed", {}, "input"),
        ("/api/embeddings", {}, "prompt"),
        ("/api/show", {"model": "other"}, "other"),
    ],
)
async def test_an_error_is_a_text_that_names_the_field(app: Any, path: str, fields: dict[str, Any], named: str) -> None:
    answer = await post(app, path, **fields)
    assert answer.status == (404 if named == "other" else 400)
    assert list(answer.json()) == ["error"]
    assert named in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/api/pull", 404), ("DELETE", "/api/delete", 404), ("GET", "/api", 404), ("DELETE", "/api/tags", 405)],
)
async def test_an_error_is_a_text_on_routes_that_are_not_there(app: Any, method: str, path: str, status: int) -> None:
    answer = await call(app, method, path)
    is_text = isinstance(answer.json()["error"], str)
    assert (answer.status, is_text) == (status, path != "/api")


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {"messages": HELLO}), (GENERATE, {"prompt": "x"}), ("/api/embed", {"input": "x"}), ("/api/show", {})],
)
async def test_a_body_without_a_type_or_with_that_of_curl_is_json(app: Any, path: str, fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "fake", **fields}).encode()
    for untyped in (None, "application/x-www-form-urlencoded"):
        assert (await call(app, "POST", path, body, {"content-type": untyped})).status == 200
        foreign = {"content-type": untyped, "origin": "http://elsewhere.example"}
        assert (await call(app, "POST", path, body, foreign)).status == 403
        assert (await call(app, "POST", "/v1/chat/completions", body, {"content-type": untyped})).status == 415
    assert (await call(app, "POST", path, body, {"content-type": "text/plain"})).status == 415


async def test_an_error_after_the_start_is_the_last_line(app: Any, engine: FakeEngineClient) -> None:
    engine.error, engine.num_tokens_before_error = RequestFailedError("the request failed"), 3
    *parts, last = lines_of(await post(app, CHAT, messages=HELLO, options=SEVEN))
    assert parts
    assert list(last) == ["error"]


async def test_no_comment_comes_between_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "INTERVAL_S", 0.01)
    slow = build_app(ready_state(FakeEngineClient(step_delay_s=0.05)))
    assert len(lines_of(await post(slow, CHAT, messages=HELLO, options={"num_predict": 3}))) == 4
    assert (
        keep_alive.COMMENT in (await post(slow, "/v1/chat/completions", messages=HELLO, max_tokens=3, stream=True)).body
    )


async def test_without_a_prompt_the_model_is_loaded(app: Any, engine: FakeEngineClient) -> None:
    chat = (await post(app, CHAT, keep_alive="10m")).json()
    prompt = (await post(app, GENERATE, keep_alive=0)).json()
    assert (chat["done_reason"], chat["message"]["content"]) == ("load", "")
    assert (prompt["done_reason"], prompt["response"]) == ("load", "")
    assert engine.admitted == []


async def test_the_tag_of_the_latest_is_understood(app: Any) -> None:
    answer = (await post(app, CHAT, model="fake:latest", messages=HELLO, options=SEVEN, stream=False)).json()
    assert answer["model"] == "fake"
    assert (await post(app, "/api/show", model="fake:latest")).status == 200


async def test_results_answer_the_calls_of_their_names(app: Any, engine: FakeEngineClient) -> None:
    calls = [{"function": {"name": name, "arguments": {"of": name}}} for name in ("tea", "sun")]
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "sun", "content": "bright"},
        {"role": "tool", "content": "hot"},
    ]
    assert (await post(app, CHAT, messages=messages, options=SEVEN, stream=False)).status == 200
    rendered = engine.rendered[-1].messages
    ids = [call["id"] for call in rendered[1]["tool_calls"]]
    assert [one["tool_call_id"] for one in rendered[2:]] == [ids[1], ids[0]]
    assert "name" not in rendered[3]
    assert "tool_name" not in rendered[2]


async def test_calls_come_whole_before_the_last_line() -> None:
    engine = FakeEngineClient()
    app = build_app(ready_state(engine, HTTPConfig(), chat=ChatOptions(tool_call_parser="hermes")))
    said = engine.script = 'Well.<tool_call>{"name": "tea", "arguments": {"hot": true}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "tea", "parameters": {"type": "object"}}}]
    asked = {"messages": HELLO, "tools": tools, "options": {"num_predict": len(said)}}
    *parts, calls, last = lines_of(await post(app, CHAT, **asked))
    assert "".join(part["message"]["content"] for part in parts) == "Well."
    [found] = calls["message"]["tool_calls"]
    assert found["function"] == {"name": "tea", "arguments": {"hot": True}}
    assert last["done"]
    whole = (await post(app, CHAT, **asked, stream=False)).json()
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [found["function"]]


@pytest.mark.parametrize(
    ("think", "expected"),
    [(True, {"enable_thinking": True, "thinking": True}), (False, {"enable_thinking": False, "thinking": False}),
     ("high", {"reasoning_effort": "high"}), (None, None)],
)  # fmt: skip
async def test_thinking_is_an_argument_of_the_template(
    app: Any, engine: FakeEngineClient, think: Any, expected: Any
) -> None:
    assert (await post(app, CHAT, messages=HELLO, options=SEVEN, think=think)).status == 200
    kwargs = engine.rendered[-1].template_kwargs
    assert (kwargs and dict(kwargs)) == expected


async def test_reasoning_is_apart_from_the_content() -> None:
    engine = FakeEngineClient()
    app = build_app(ready_state(engine, HTTPConfig(), chat=ChatOptions(reasoning_parser="deepseek_r1")))
    said = "Hm.</think>Yes."
    asked = {"messages": [{"role": "user", "content": said}], "options": {"num_predict": len(said)}}
    message = (await post(app, CHAT, **asked, stream=False)).json()["message"]
    assert message == {"role": "assistant", "content": "Yes.", "thinking": "Hm."}
    *parts, _ = lines_of(await post(app, CHAT, **asked))
    assert "".join(part["message"].get("thinking", "") for part in parts) == "Hm."
    assert "".join(part["message"]["content"] for part in parts) == "Yes."
    assert not any("thinking" in part["message"] and part["message"]["content"] for part in parts)


async def test_texts_become_vectors(app: Any) -> None:
    both = (await post(app, "/api/embed", input=["a", "bc"])).json()
    one = (await post(app, "/api/embed", input="a")).json()
    older = (await post(app, "/api/embeddings", prompt="a")).json()
    assert both["embeddings"][0] == one["embeddings"][0] == older["embedding"]
    assert (len(both["embeddings"]), both["prompt_eval_count"]) == (2, 3)


@pytest.mark.parametrize(("path", "fields"), [("/api/embed", {"input": ["a"]}), ("/api/embeddings", {"prompt": "a"})])
async def test_vectors_are_those_of_the_named_adapter(
    app: Any, engine: FakeEngineClient, path: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    await engine.load_adapter("own", str(write_adapter(tmp_path / "own")))
    assert (await post(app, path, model="own", **fields)).status == 200
    assert engine.pooling_adapter is not None
    assert engine.pooling_adapter.name == "own"


async def test_models_are_described(app: Any) -> None:
    [model] = (await call(app, "GET", "/api/tags")).json()["models"]
    [running] = (await call(app, "GET", "/api/ps")).json()["models"]
    shown = (await post(app, "/api/show")).json()
    assert (model["name"], running["name"]) == ("fake", "fake")
    assert model["digest"] == running["digest"]
    assert model["details"] == shown["details"]
    assert "completion" in shown["capabilities"]
    assert (await call(app, "GET", "/api/version")).json()["version"].count(".") == 2
