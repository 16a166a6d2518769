"""What clients see of the route for embeddings, over the fake engine and over `AsyncLLM` with an echoing core."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_helpers.engines import either_engine
from server_helpers.waiting import wait_until

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_server.apis.pooling.engine_run import MAX_NUM_IN_FLIGHT
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import READY, Answer, FakeEngineClient, call, ready_state
from llmstack_types import PoolingParams, RequestFailedError, ServerOverloadedError

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(params=["fake", "async_llm"])
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    async with either_engine(request.param, tmp_path) as app:
        yield app


async def embed(app: Any, value: Any, **fields: Any) -> Answer:
    return await call(app, "POST", EMBEDDINGS, {"input": value, **fields})


def vectors(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


async def test_the_answer_has_the_shape_of_openai(app: Any) -> None:
    answer = await embed(app, [7, 9, 8], user="somebody")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [3.0, 7.0, 9.0, 8.0]}],
        "model": "fake",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize(
    ("value", "lengths"), [("abc", [3]), (["a", "bcd"], [1, 3]), ([5, 6], [2]), ([[5, 6], [7]], [2, 1])], ids=repr
)
async def test_inputs_come_in_every_form(app: Any, value: Any, lengths: list[int]) -> None:
    answer = await embed(app, value)
    assert [vector[0] for vector in vectors(answer)] == lengths
    assert answer.json()["usage"]["total_tokens"] == sum(lengths)


async def test_base64_is_the_same_vector(app: Any) -> None:
    (numbers,) = vectors(await embed(app, [7, 9, 8], encoding_format="float"))
    (text,) = vectors(await embed(app, [7, 9, 8], encoding_format="base64"))
    assert list(struct.unpack("<4f", base64.b64decode(text))) == numbers


async def test_vectors_may_be_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, found = FakeEngineClient(), []
    admit = engine.admit_pooling

    async def note(prompt: Any, params: PoolingParams, **options: Any) -> Any:
        found.append(params.normalize)
        return await admit(prompt, params, **options)

    monkeypatch.setattr(engine, "admit_pooling", note)
    for fields in ({}, {"use_activation": False}, {"normalize": True, "use_activation": False}):
        await call(build_app(ready_state(engine)), "POST", "/v1/embeddings", {"input": "Hello", **fields})
    assert found == [None, False, True]


async def test_a_request_may_be_named() -> None:
    app = build_app(ready_state(FakeEngineClient()))
    answer = await call(app, "POST", "/pooling", {"input": "Hello", "task": "embed", "request_id": "mine"})
    assert answer.json()["id"] == "pool-mine"
    refused = await call(app, "POST", "/v1/embeddings", {"input": "Hello", "request_id": "a b"})
    assert refused.json()["error"]["param"] == "request_id"


async def test_fewer_dimensions_give_a_shorter_vector(app: Any) -> None:
    assert vectors(await embed(app, [7, 9, 8], dimensions=2)) == [[3.0, 7.0]]


async def test_longer_inputs_are_cut_where_that_is_asked_for(app: Any) -> None:
    assert [vector[0] for vector in vectors(await embed(app, ["a" * 500, "b"], truncate_prompt_tokens=2))] == [2, 1]
    assert vectors(await embed(app, [7, 9, 8], truncate_prompt_tokens=2)) == [[2.0, 7.0, 9.0, 9.0]]
    assert vectors(await embed(app, [7, 9, 8], truncate_prompt_tokens=2, truncation_side="left"))[0][1] == 9.0
    assert vectors(await embed(app, "a" * 500, truncate_prompt_tokens=-1))[0][0] == 128


async def test_a_conversation_is_an_input_too(app: Any) -> None:
    messages = [{"role": "user", "content": "abc"}]
    answer = await call(app, "POST", EMBEDDINGS, {"messages": messages})
    (vector,) = vectors(answer)
    assert answer.json()["usage"]["prompt_tokens"] == vector[0] >= 3


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "empty_array"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": {"text": "a"}}, "input", "invalid_type"),
        ({"input": [[1], []]}, "input[1]", "empty_array"),
        ({"input": [1, "a"]}, "input[1]", "invalid_value"),
        ({"input": [1, True]}, "input[1]", "invalid_value"),
        ({"input": ["a", 1]}, "input[1]", "invalid_type"),
        ({"input": [[1], [2, 9999]]}, "input[1][1]", "invalid_value"),
        ({"input": "a" * 129}, "input", "context_length_exceeded"),
        ({"input": ["a", "a" * 129]}, "input[1]", "context_length_exceeded"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": "a", "dimensions": 0}, "dimensions", "integer_below_min_value"),
        ({"input": "a", "dimensions": 5}, "dimensions", "integer_above_max_value"),
        ({"input": "a", "dimensions": 2.5}, "dimensions", "invalid_type"),
        ({"input": "a", "dimensions": 10**400}, "dimensions", "integer_above_max_value"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"input": "a", "encoding_format": 1}, "encoding_format", "invalid_type"),
        ({"input": "a", "normalize": "yes"}, "normalize", "invalid_type"),
        ({"input": "a", "priority": 2**40}, "priority", "integer_above_max_value"),
        ({"input": "a", "cache_salt": "s" * 200}, "cache_salt", "string_above_max_length"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "integer_above_max_value"),
        ({"input": "a", "truncate_prompt_tokens": "3"}, "truncate_prompt_tokens", "invalid_type"),
        ({"input": "a", "truncate_prompt_tokens": 3, "truncation_side": "x"}, "truncation_side", "invalid_value"),
        ({"input": "a", "messages": []}, "input", "invalid_value"),
        ({"messages": ["a"]}, "messages[0]", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"},
            "chat_template",
            "unsupported_parameter",
        ),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "unsupported_parameter"),
    ],
    ids=lambda value: repr(value)[:60],
)
async def test_bad_requests_are_refused_by_field(app: Any, body: dict[str, Any], param: str, code: str) -> None:
    answer = await call(app, "POST", EMBEDDINGS, body)
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"
    assert len(answer.body) < 2048


async def test_an_unknown_model_and_an_unknown_field_are_treated_as_elsewhere() -> None:
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(is_strict_params=True)))
    assert (await embed(app, "a", model="other")).status == 404
    assert (await embed(app, "a", mystery=1)).json()["error"]["code"] == "unknown_parameter"


async def test_two_thousand_inputs_are_answered_with_a_bounded_number_in_flight() -> None:
    engine = FakeEngineClient()
    answer = await embed(build_app(ready_state(engine)), [[1 + index % 200] for index in range(2048)])
    assert [vector[1] for vector in vectors(answer)] == [1 + index % 200 for index in range(2048)]
    assert engine.max_num_running == MAX_NUM_IN_FLIGHT


async def test_a_model_that_only_computes_embeddings_refuses_all_other_requests(tmp_path: Path) -> None:
    core = FakeEngineCoreClient(replace(READY, is_generative=False))
    folder = write_model_folder(tmp_path / "model")
    engine = AsyncLLM(load_model_config(str(folder)), core, load_tokenizer(folder))
    await engine.wait_until_ready()
    app = build_app(ready_state(engine, ready=core.ready))
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 0}),
        ("/v1/completions", {"prompt": ["a"] * 5, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = await call(app, "POST", path, body)
        error = answer.json()["error"]
        assert (answer.status, error["param"], error["code"]) == (400, "model", "unsupported_value")
        assert error["message"].startswith("The model does not support Completions API")
    assert len(vectors(await embed(app, "a"))) == 1
    await engine.shutdown()


async def test_a_model_without_vectors_says_so(tmp_path: Path) -> None:
    core = FakeEngineCoreClient(replace(READY, embedding_size=0))
    folder = write_model_folder(tmp_path / "model")
    engine = AsyncLLM(load_model_config(str(folder)), core, load_tokenizer(folder))
    answer = await embed(build_app(ready_state(engine, ready=core.ready)), "a")
    assert answer.status == 400
    assert "computes no embeddings" in answer.json()["error"]["message"]
    await engine.shutdown()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(ServerOverloadedError("full"), 503, "server_is_overloaded"), (RequestFailedError("nan"), 500, "internal_error")],
)
async def test_what_fails_in_the_engine_has_its_status(error: Exception, status: int, code: str) -> None:
    engine = FakeEngineClient()
    engine.error = error
    answer = await embed(build_app(ready_state(engine)), ["a", "b"])
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)


async def test_a_client_that_leaves_aborts_its_inputs() -> None:
    engine = FakeEngineClient(step_delay_s=60.0)
    app = build_app(ready_state(engine))
    body = {"input": ["a", "b", "c"]}
    await call(app, "POST", EMBEDDINGS, body, disconnect_after_parts=0)
    await wait_until(lambda: len(engine.aborted_request_ids) == 3)
    assert engine.num_running == 0
