"""What a request or a flag may say about the answer: ids, tokens by number, prompts, usage, chunks, prompts cut."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import AsyncLLM
from llmstack_llm.admission import sampling
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_server.apis.openai import completions
from llmstack_server.app import build_app
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.http_options import AnswerConfig
from llmstack_server.testing import READY, FakeEngineClient, call, ready_state
from llmstack_types import RepetitionDetectionParams, ThinkingTags

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def fake_app(http: HTTPConfig | None = None) -> Any:
    return build_app(ready_state(FakeEngineClient(), http))


@pytest.fixture
async def llm_app(tmp_path: Path) -> AsyncIterator[Any]:
    """The application over the real front end and an engine that repeats the prompt."""
    folder = write_model_folder(tmp_path / "m")
    client = FakeEngineCoreClient()
    llm = AsyncLLM(load_model_config(str(folder)), client, load_tokenizer(folder))
    await llm.wait_until_ready()
    yield build_app(ready_state(llm, ready=client.ready))
    await llm.shutdown()


@pytest.mark.parametrize(("flag", "field", "shown"), [(False, True, True), (True, None, True), (True, False, False)])
async def test_tokens_of_logprobs_may_be_shown_as_ids(flag: bool, field: bool | None, shown: bool):
    app = fake_app(HTTPConfig(answers=AnswerConfig(shows_tokens_as_ids=flag)))
    body = {"max_tokens": 1, **({} if field is None else {"return_tokens_as_token_ids": field})}
    answer = await call(app, "POST", COMPLETIONS, {**body, "prompt": "Hi", "logprobs": 1, "echo": True})
    found = answer.json()["choices"][0]["logprobs"]
    assert found["tokens"] == (["token_id:72", "token_id:105", "token_id:72"] if shown else ["H", "i", "H"])
    assert set(found["top_logprobs"][2]) == ({"token_id:72", "token_id:65"} if shown else {"H", "A"})
    assert found["text_offset"] == [0, 1, 2]
    chat = await call(app, "POST", CHAT, {**body, "messages": HELLO, "logprobs": True, "top_logprobs": 1})
    entry = chat.json()["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == ("token_id:72" if shown else "H")
    assert entry["bytes"] == [72]
    assert entry["top_logprobs"][0]["token"] == entry["token"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True, "logprobs": 1}, "logprobs"), ({"prompt_logprobs": 1}, "prompt_logprobs")],
)
async def test_log_probabilities_of_prompts_are_bounded_in_all_choices_together(
    llm_app: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str
):
    monkeypatch.setattr(sampling, "MAX_PROMPT_LOGPROBS", 24)
    body = {"prompt": [[5, 6, 7], [8, 9, 10]], "max_tokens": 1, **fields}
    assert (await call(llm_app, "POST", COMPLETIONS, {**body, "n": 2})).status == 200
    refused = await call(llm_app, "POST", COMPLETIONS, {**body, "n": 3})
    error = refused.json()["error"]
    assert (refused.status, error["code"], error["param"]) == (400, "request_budget_exceeded", param)
    assert error["message"].startswith("This request asks for 36 numbers; at most 24 are allowed")


async def test_a_stream_repeats_log_probabilities_of_short_prompts_alone(monkeypatch: pytest.MonkeyPatch):
    engine = FakeEngineClient()
    app = build_app(ready_state(engine))
    monkeypatch.setattr(completions, "MAX_NUMBERS_OF_EVENTS", 20)
    body = {"prompt": "Hello", "echo": True, "logprobs": 1, "max_tokens": 1, "stream": True, "n": 2}
    assert (await call(app, "POST", COMPLETIONS, body)).status == 200
    refused = await call(app, "POST", COMPLETIONS, {**body, "n": 3})
    error = refused.json()["error"]
    assert (refused.status, error["code"], error["param"]) == (400, "request_budget_exceeded", "stream")
    assert (await call(app, "POST", COMPLETIONS, {**body, "n": 3, "stream": False})).status == 200


@pytest.mark.parametrize("max_tokens", [1, 3, 99])
@pytest.mark.parametrize("extra", [{}, {"stop": "l"}, {"n": 2}])
async def test_chunks_of_plain_text_are_those_of_a_stream_that_counts_its_tokens(
    max_tokens: int, extra: dict[str, Any]
):
    app, events = fake_app(), {}
    for counts in (False, True):
        body: dict[str, Any] = {"messages": HELLO, "max_tokens": max_tokens, "stream": True, **extra}
        if counts:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        *found, done = (await call(app, "POST", CHAT, body)).events()
        assert done == "[DONE]"
        unlike = {"id", "created", "usage"}
        events[counts] = [{k: v for k, v in event.items() if k not in unlike} for event in found if event["choices"]]
    assert events[False] == events[True]
    assert "stop_reason" in events[False][-1]["choices"][0]


@pytest.mark.parametrize(
    ("path", "prefix", "body"),
    [(COMPLETIONS, "cmpl-", {"prompt": "Hi", "max_tokens": 2}), (CHAT, "chatcmpl-", {"messages": HELLO})],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_may_name_its_answer_even_twice(path: str, prefix: str, body: dict[str, Any], stream: bool):
    app = fake_app()
    for _ in range(2):
        answer = await call(app, "POST", path, {**body, "request_id": "mine-1", "stream": stream})
        first = answer.events()[0] if stream else answer.json()
        assert first["id"] == f"{prefix}mine-1"


@pytest.mark.parametrize("request_id", ["", "a b", "é", "x" * 129])
async def test_ids_that_a_log_should_not_show_are_refused(request_id: str):
    answer = await call(fake_app(), "POST", COMPLETIONS, {"prompt": "Hi", "request_id": request_id})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "request_id")


async def test_a_chat_may_show_its_prompt():
    body = {"messages": HELLO, "max_tokens": 1, "return_prompt_text": True}
    assert (await call(fake_app(), "POST", CHAT, body)).json()["prompt_text"] == "Hello"
    assert (await call(fake_app(), "POST", CHAT, {**body, "stream": True})).events()[0]["prompt_text"] == "Hello"
    assert "prompt_text" not in (await call(fake_app(), "POST", CHAT, {"messages": HELLO, "max_tokens": 1})).json()


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": HELLO})])
async def test_a_flag_puts_the_usage_into_every_chunk(path: str, body: dict[str, Any]):
    body = {**body, "max_tokens": 2, "stream": True}
    app = fake_app(HTTPConfig(answers=AnswerConfig(forces_usage=True)))
    *chunks, done = (await call(app, "POST", path, body)).events()
    assert (chunks[-1]["choices"], done) == ([], "[DONE]")
    role = [0] if path == CHAT else []
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*role, 1, 2, 2]
    assert (await call(fake_app(), "POST", path, body)).events()[-2]["choices"] != []


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "abcdef"}), (CHAT, {"messages": HELLO})])
async def test_chunks_may_hold_several_tokens_and_say_the_same(llm_app: Any, path: str, body: dict[str, Any]):
    def texts(events: list[Any]) -> list[str]:
        choices = [event["choices"][0] for event in events if event != "[DONE]"]
        return [text for one in choices if (text := one.get("text", one.get("delta", {}).get("content")))]

    body = {**body, "max_tokens": 9, "temperature": 0, "stream": True}
    one_by_one = texts((await call(llm_app, "POST", path, body)).events())
    by_four = texts((await call(llm_app, "POST", path, {**body, "stream_interval": 4})).events())
    assert "".join(by_four) == "".join(one_by_one)
    assert [len(text) for text in by_four] == [1, 4, 4]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_pattern_size": 2, "min_count": 1}, "repetition_detection.min_count"),
        ({"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}, "repetition_detection.min_pattern_size"),
        ({"max_pattern_size": 257, "min_count": 2}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": True, "min_count": 2}, "repetition_detection.max_pattern_size"),
        ({"max_size": 2}, "repetition_detection.max_size"),
        ([], "repetition_detection"),
    ],
)
async def test_what_counts_as_a_repetition_is_checked(given: Any, param: str):
    answer = await call(fake_app(), "POST", COMPLETIONS, {"prompt": "Hi", "repetition_detection": given})
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_named_tokens_are_shown_in_place_of_the_most_likely_ones():
    engine = FakeEngineClient()
    app = build_app(ready_state(engine))
    fields = {"logprob_token_ids": [72, 65, 72], "max_tokens": 1}
    chat = {"messages": HELLO, **fields, "logprobs": True, "top_logprobs": 5}
    entry = (await call(app, "POST", CHAT, chat)).json()["choices"][0]["logprobs"]["content"][0]
    assert [other["token"] for other in entry["top_logprobs"]] == ["H", "A"]
    params = engine.admitted[-1].sampling_params
    assert (params.logprobs, params.logprob_token_ids) == (0, (72, 65))
    answer = await call(app, "POST", COMPLETIONS, {"prompt": "Hi", "logprobs": 4, **fields})
    assert set(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0]) == {"H", "A"}
    for path, body in ((COMPLETIONS, {"prompt": "Hi", **fields}), (CHAT, {"messages": HELLO, **fields})):
        error = (await call(app, "POST", path, body)).json()["error"]
        assert (error["param"], "together with 'logprobs'" in error["message"]) == ("logprob_token_ids", True)


async def test_the_sampled_token_stands_beside_those_that_are_named():
    app = build_app(ready_state(FakeEngineClient()))
    fields = {"logprob_token_ids": [65, 66], "max_tokens": 1, "return_tokens_as_token_ids": True}
    chat = {"messages": HELLO, **fields, "logprobs": True, "top_logprobs": 1}
    entry = (await call(app, "POST", CHAT, chat)).json()["choices"][0]["logprobs"]["content"][0]
    assert {other["token"] for other in entry["top_logprobs"]} == {"token_id:72", "token_id:65", "token_id:66"}
    answer = await call(app, "POST", COMPLETIONS, {"prompt": "Hi", "logprobs": 1, **fields})
    shown = answer.json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert set(shown) == {"token_id:72", "token_id:65", "token_id:66"}


async def test_log_probabilities_of_the_whole_vocabulary_are_asked_for_by_minus_one():
    engine = FakeEngineClient()
    engine.limits = dataclasses.replace(engine.limits, max_logprobs=engine.limits.vocab_size)
    app, one = build_app(ready_state(engine)), {"max_tokens": 1}
    asked = {"prompt": "Hi", "logprobs": -1, "prompt_logprobs": -1, "return_tokens_as_token_ids": True, **one}
    choice = (await call(app, "POST", COMPLETIONS, asked)).json()["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"][0]) == len(choice["prompt_logprobs"][1]) == 256
    chat = {"messages": HELLO, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1, **one}
    answer = (await call(app, "POST", CHAT, chat)).json()
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 256
    assert len(answer["prompt_logprobs"][1]) == 256


@pytest.mark.parametrize(
    ("path", "body", "is_open"),
    [
        (CHAT, {"messages": HELLO}, True),
        (CHAT, {"messages": [{"role": "user", "content": "a</think>"}]}, False),
        (COMPLETIONS, {"prompt": "a<think>b"}, True),
        (COMPLETIONS, {"prompt": "<think>b</think>"}, False),
        (COMPLETIONS, {"prompt": list(b"a<think>b</think")}, True),
        (COMPLETIONS, {"prompt": list(b"<think>b</think>")}, False),
        (COMPLETIONS, {"prompt": "a"}, True),
    ],
)
async def test_a_budget_of_reasoning_reaches_the_engine_with_the_tags(path: str, body: dict[str, Any], is_open: bool):
    engine = FakeEngineClient()
    app = build_app(ready_state(engine, chat=ChatOptions(reasoning_parser="deepseek_r1")))
    body = {**body, "max_tokens": 1, "thinking_token_budget": 3}
    assert (await call(app, "POST", path, body)).status == 200
    params = engine.admitted[-1].sampling_params
    tags = ThinkingTags(tuple(b"<think>"), tuple(b"</think>"), is_open)
    assert (params.thinking_token_budget, params.thinking_tags) == (3, tags)
    assert (await call(app, "POST", path, {**body, "thinking_token_budget": -1})).status == 200
    assert engine.admitted[-1].sampling_params.thinking_token_budget is None


@pytest.mark.parametrize("fields", [{"prompt": ["<think>", "</think>"]}, {"prompt": "a", "guided_regex": "a"}])
async def test_a_budget_of_completions_has_its_conditions(fields: dict[str, Any]):
    app = build_app(ready_state(FakeEngineClient(), chat=ChatOptions(reasoning_parser="deepseek_r1")))
    body = {"max_tokens": 1, "thinking_token_budget": 3, **fields}
    error = (await call(app, "POST", COMPLETIONS, body)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "thinking_token_budget")
    several = {"max_tokens": 1, "thinking_token_budget": 3, "prompt": ["<think>", "a<think>b"]}
    assert (await call(app, "POST", COMPLETIONS, several)).status == 200


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})])
async def test_a_budget_needs_a_model_whose_reasoning_is_known(llm_app: Any, path: str, body: dict[str, Any]):
    answer = await call(llm_app, "POST", path, {**body, "max_tokens": 1, "thinking_token_budget": 3})
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "unsupported_value", "thinking_token_budget")
    assert "--reasoning-parser" in error["message"]


async def test_repetition_detection_reaches_the_engine():
    engine = FakeEngineClient()
    body = {"max_tokens": 1, "repetition_detection": {"max_pattern_size": 3, "min_count": 2}}
    app = build_app(ready_state(engine))
    assert (await call(app, "POST", CHAT, {**body, "messages": HELLO})).status == 200
    assert engine.admitted[-1].sampling_params.repetition_detection == RepetitionDetectionParams(3, 0, 2)
    assert (await call(app, "POST", COMPLETIONS, {"prompt": "Hi", "repetition_detection": {}})).status == 200
    assert engine.admitted[-1].sampling_params.repetition_detection is None


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": HELLO})])
async def test_the_usage_of_a_chunk_counts_what_has_been_sent(path: str, body: dict[str, Any]):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**body, "max_tokens": 2, "n": 2, "seed": 1, "stream": True, "stream_options": options}
    *chunks, _ = (await call(fake_app(), "POST", path, body)).events()
    roles = [0, 0] if path == CHAT else []
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*roles, 1, 2, 3, 4, 4]
    assert all(chunk["usage"]["total_tokens"] - chunk["usage"]["completion_tokens"] > 0 for chunk in chunks)


async def test_a_prompt_may_be_cut(llm_app: Any):
    body = {"prompt": "abcdef", "max_tokens": 3, "temperature": 0, "echo": True, "truncate_prompt_tokens": 2}
    assert (await call(llm_app, "POST", COMPLETIONS, body)).json()["choices"][0]["text"] == "efefe"
    body["truncation_side"] = "right"
    answer = (await call(llm_app, "POST", COMPLETIONS, body)).json()
    assert (answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == ("ababa", 2)
    long = {"prompt": "x" * 5000, "max_tokens": 3, "truncate_prompt_tokens": -1}
    assert (await call(llm_app, "POST", COMPLETIONS, long)).json()["usage"]["prompt_tokens"] == READY.max_model_len - 3
    refused = await call(llm_app, "POST", COMPLETIONS, {**body, "truncate_prompt_tokens": -2})
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"
    # Also where nothing is to be cut.
    refused = await call(llm_app, "POST", COMPLETIONS, {"prompt": "abc", "truncation_side": "up"})
    assert refused.json()["error"]["param"] == "truncation_side"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 2, "n": 2}),
        (CHAT, {"messages": HELLO, "max_tokens": 2}),
        ("/v1/embeddings", {"input": ["a", "bc"]}),
    ],
)
async def test_an_invocation_is_answered_as_the_route_it_is_meant_for(path: str, body: dict[str, Any]):
    app = fake_app()
    expected, found = [(await call(app, "POST", one, body)).json() for one in (path, "/invocations")]
    for answer in (expected, found):
        answer.pop("id", None)
        answer.pop("created", None)
    assert found == expected


async def test_an_invocation_that_says_nothing_is_refused():
    answer = await call(fake_app(), "POST", "/invocations", {"model": "fake"})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "missing_required_parameter")
    stream = await call(fake_app(), "POST", "/invocations", {"prompt": "Hi", "max_tokens": 2, "stream": True})
    assert stream.events()[-1] == "[DONE]"


async def test_the_tokenizers_configuration_is_shown_by_flag_only():
    assert (await call(fake_app(), "GET", "/tokenizer_info")).status == 404
    answer = await call(fake_app(HTTPConfig(has_tokenizer_info=True)), "GET", "/tokenizer_info")
    assert answer.json() == {"tokenizer_class": "ByteTokenizer"}


async def test_without_a_tokenizer_token_ids_go_in_and_out(tmp_path: Path):
    folder = write_model_folder(tmp_path / "m")
    client = FakeEngineCoreClient()
    llm = AsyncLLM(load_model_config(str(folder), skip_tokenizer_init=True), client, None)
    await llm.wait_until_ready()
    app = build_app(ready_state(llm, ready=client.ready))
    body = {"prompt": [5, 6], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    [choice] = (await call(app, "POST", COMPLETIONS, body)).json()["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", [5, 6, 5])
    texts: tuple[tuple[str, Any, str], ...] = (
        (COMPLETIONS, {"prompt": "Hi"}, "prompt"),
        (COMPLETIONS, {**body, "stop": "a"}, "stop"),
        (COMPLETIONS, {**body, "echo": True}, "echo"),
        (CHAT, {"messages": HELLO}, "messages"),
        ("/tokenize", {"prompt": "Hi"}, "prompt"),
        ("/detokenize", {"tokens": [5]}, "tokens"),
    )
    for path, refused, param in texts:
        answer = await call(app, "POST", path, refused)
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "unsupported_value", param)
        assert "tokenizer" in error["message"]
    await llm.shutdown()


async def test_a_listed_model_says_what_may_be_done_with_it():
    [model] = (await call(fake_app(), "GET", "/v1/models")).json()["data"]
    names = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "chat", "speech", "permission"}
    assert set(model) == names
    assert model["permission"][0]["object"] == "model_permission"
    assert model["permission"][0]["allow_sampling"] is True


@pytest.mark.parametrize("path", ["/v1/models", "/llm/v1/models", "/health", "/llm/health", "/llm/openapi.json"])
async def test_a_proxys_prefix_may_be_there_or_taken_away(path: str):
    answer = await call(fake_app(HTTPConfig(root_path="/llm")), "GET", path)
    assert answer.status == 200
    if "openapi" in path:
        assert answer.json()["servers"] == [{"url": "/llm"}]
