"""Several conversations in one answer, prompts that are only rendered, and the load in a header."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmstack_llm import ChatPrompt, request_errors
from llmstack_llm.admission.sampling import NO_SAMPLING
from llmstack_server.app import build_app
from llmstack_server.testing import FakeEngineClient, call, ready_state

BATCH = "/v1/chat/completions/batch"


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def app() -> Any:
    return build_app(ready_state(FakeEngineClient()))


async def test_each_conversation_of_a_batch_is_a_choice(app: Any) -> None:
    body = {"messages": [conversation("Hello"), conversation("abc")], "max_tokens": 3, "request_id": "mine"}
    answer = (await call(app, "POST", BATCH, body)).json()
    assert (answer["id"], answer["object"]) == ("chatcmpl-mine", "chat.completion")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hel", "abc"]
    assert answer["usage"] == {
        "prompt_tokens": 8, "completion_tokens": 6, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": [conversation("a")] * 129}, "messages", "array_above_max_length"),
        ({"messages": [conversation("a"), conversation("bad")]}, "messages[1][0].role", "invalid_value"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"tools": []}, "tools", "unsupported_parameter"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    ],
)
async def test_a_batch_names_the_conversation_at_fault(fields: dict[str, Any], param: str, code: str) -> None:
    class Picky(FakeEngineClient):
        async def render(self, chat: ChatPrompt, sampling: Any = NO_SAMPLING) -> Any:
            if chat.messages == conversation("bad"):
                raise request_errors.invalid_value("messages[0].role", "it is bad")
            return await super().render(chat, sampling)

    engine = Picky()
    app = build_app(ready_state(engine))
    answer = await call(app, "POST", BATCH, {"messages": [conversation("a")], **fields})
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["code"]) == (400, param, code)
    assert engine.num_running == 0


async def test_prompts_are_rendered_and_nothing_is_computed() -> None:
    engine = FakeEngineClient()
    app = build_app(ready_state(engine))
    body = {"messages": conversation("Hi"), "max_tokens": 3, "response_format": {"type": "json_object"}}
    chat = (await call(app, "POST", "/v1/chat/completions/render", {**body, "request_id": "mine"})).json()
    assert (chat["request_id"], chat["token_ids"], chat["stream"]) == ("chatcmpl-mine", list(b"Hi"), False)
    assert chat["sampling_params"] == {"max_tokens": 3, "structured_outputs": {"json_object": True}}
    body = {"prompt": ["Hi", "you"], "temperature": 0, "priority": 2}
    rendered = (await call(app, "POST", "/v1/completions/render", body)).json()
    assert [one["token_ids"] for one in rendered] == [list(b"Hi"), list(b"you")]
    assert [(one["priority"], one["sampling_params"]) for one in rendered] == [(2, {"temperature": 0.0})] * 2
    assert engine.admitted == []
    refused = await call(app, "POST", "/v1/completions/render", {"prompt": "Hi", "temperature": 3})
    assert refused.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/completions/render"])
async def test_too_many_prompts_are_refused_before_any_is_tokenized(path: str) -> None:
    class Counting(FakeEngineClient):
        num_tokenized = 0

        async def get_tokenizer(self, param: str = "prompt") -> Any:
            self.num_tokenized += 1
            return await super().get_tokenizer(param)

        async def tokenize(self, text: str, **options: Any) -> list[int]:
            self.num_tokenized += 1
            return await super().tokenize(text, **options)

    engine = Counting()
    app = build_app(ready_state(engine))
    answer = await call(app, "POST", path, {"prompt": ["Hi"] * 2000, "echo": True})
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["code"]) == (400, "prompt", "request_budget_exceeded")
    assert engine.num_tokenized == 0


@pytest.mark.parametrize("form", ["text", "JSON"])
async def test_a_request_may_ask_for_the_load(app: Any, form: str) -> None:
    body = {"prompt": "Hi", "max_tokens": 1}
    for stream in (False, True):
        headers = {"endpoint-load-metrics-format": form}
        answer = await call(app, "POST", "/v1/completions", {**body, "stream": stream}, headers)
        load = answer.headers["endpoint-load-metrics"]
        if form == "text":
            assert load == "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0"
        else:
            assert load.startswith("JSON ")
            values = {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0.0}
            assert json.loads(load[5:]) == {"named_metrics": values}
    for headers in ({}, {"endpoint-load-metrics-format": "bin"}):
        answer = await call(app, "POST", "/v1/completions", body, headers)
        assert "endpoint-load-metrics" not in answer.headers


async def test_a_slash_after_the_models_changes_nothing(app: Any) -> None:
    assert (await call(app, "GET", "/v1/models/")).json() == (await call(app, "GET", "/v1/models")).json()
