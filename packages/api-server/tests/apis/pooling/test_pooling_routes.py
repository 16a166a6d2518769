"""What clients see of the routes for labels, scores, documents and raw numbers, over the fake engine."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_server.apis.pooling import inputs, scores
from llmstack_server.apis.pooling.engine_run import MAX_NUM_IN_FLIGHT
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_server.web.fields import PoolingFields

TEXTS = {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]}
PICTURE = {
    "content": [*TEXTS["content"][:1], {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
}
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


def app_of(engine: FakeEngineClient, **http: Any) -> Any:
    return build_app(ready_state(engine, HTTPConfig(**http), ready=engine.ready))


async def post(num_labels: int, path: str, **body: Any) -> Answer:
    return await call(app_of(FakeEngineClient(num_labels=num_labels)), "POST", path, body)


def answered(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def usage(num_tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return counts | {"completion_tokens": 0, "prompt_tokens_details": None}


# --- labels -------------------------------------------------------------------------------------------------------


async def test_a_prompt_gets_a_number_for_each_label_and_the_name_of_the_best() -> None:
    body = answered(await post(2, "/classify", input=[[7, 9, 8], [1, 5]]))
    assert body.pop("id").startswith("classify-")
    assert body.pop("created") > 0
    assert body == {
        "object": "list",
        "model": "fake",
        "data": [
            {"index": 0, "label": "b", "probs": [3.0, 7.0], "num_classes": 2},
            {"index": 1, "label": "a", "probs": [2.0, 1.0], "num_classes": 2},
        ],
        "usage": usage(5),
    }


async def test_a_label_without_a_name_has_transformers_name_for_it() -> None:
    engine = FakeEngineClient(num_labels=2)
    engine.label_names = {0: "a"}
    body = answered(await call(app_of(engine), "POST", "/classify", {"input": [7, 9, 8]}))
    assert body["data"][0]["label"] == "LABEL_1"


async def test_a_conversation_can_be_classified_and_cut() -> None:
    messages = [{"role": "user", "content": "abcdef"}]
    body = answered(await post(1, "/classify", messages=messages, truncate_prompt_tokens=4))
    assert body["data"][0]["probs"] == [4.0]


# --- raw numbers ----------------------------------------------------------------------------------------------------


async def test_the_task_is_what_the_model_is_for_unless_it_is_named() -> None:
    for num_labels, task, expected in (
        (0, None, [3.0, 7.0, 9.0, 8.0]),
        (2, None, [3.0, 7.0]),
        (2, "embed", [3.0, 7.0, 9.0, 8.0]),
        (1, "score", [3.0]),
        (2, "token_classify", [[1.0, 7.0], [1.0, 9.0], [1.0, 8.0]]),
        (0, "token_embed", [[1.0, 7.0, 7.0, 7.0], [1.0, 9.0, 9.0, 9.0], [1.0, 8.0, 8.0, 8.0]]),
    ):
        body = answered(await post(num_labels, "/pooling", input=[7, 9, 8], task=task))
        assert body["id"].startswith("pool-")
        assert body["data"] == [{"index": 0, "object": "pooling", "data": expected}]
        assert body["usage"] == usage(3)


async def test_the_vectors_of_all_tokens_come_as_base64_too() -> None:
    body = answered(await post(0, "/pooling", input="ab", task="token_embed", encoding_format="base64", dimensions=2))
    assert struct.unpack("<4f", base64.b64decode(body["data"][0]["data"])) == (1.0, 97.0, 1.0, 98.0)


async def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_NUMBERS_PER_ANSWER", 12)
    assert (await post(0, "/pooling", input="abc", task="token_embed")).status == 200
    assert (await post(0, "/pooling", input=["a"] * 6, dimensions=2)).status == 200
    error = (await post(0, "/pooling", input=["ab", "cd"], task="token_embed")).json()["error"]
    assert (error["param"], error["code"]) == ("input", "request_budget_exceeded")
    assert "asks for 16 numbers; at most 12" in error["message"]


# --- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
async def test_a_cross_encoder_scores_each_pair_under_every_pair_of_names(path: str, names: tuple[str, str]) -> None:
    body = answered(await post(1, path, **{names[0]: "ab", names[1]: ["c", {"text": "def"}]}))
    assert body.pop("id").startswith("score-")
    assert body.pop("created") > 0
    assert body == {
        "object": "list",
        "model": "fake",
        "data": [{"index": 0, "object": "score", "score": 4.0}, {"index": 1, "object": "score", "score": 6.0}],
        "usage": usage(10),
    }


async def test_a_third_list_is_refused_and_not_left_out() -> None:
    answer = await post(1, "/score", text_1="a", text_2="b", documents=["c"])
    assert (answer.status, answer.json()["error"]["param"]) == (400, "documents")


async def test_texts_are_paired_one_by_one_and_cut() -> None:
    body = answered(await post(1, "/score", text_1=["a", "bc"], text_2=["d", "ef"]))
    assert [one["score"] for one in body["data"]] == [3.0, 5.0]
    body = answered(await post(1, "/score", text_1="a", text_2="b" * 500, truncate_prompt_tokens=20))
    assert [one["score"] for one in body["data"]] == [20.0]


async def test_scores_of_a_model_of_vectors_are_their_products() -> None:
    body = answered(await post(0, "/score", text_1="A", text_2=["B", "CC"]))
    (a, b, c) = ([1.0, 65.0, 65.0, 65.0], [1.0, 66.0, 66.0, 66.0], [2.0, 67.0, 67.0, 67.0])
    expected = [sum(x * y for x, y in zip(a, other, strict=True)) for other in (b, c)]
    assert [one["score"] for one in body["data"]] == expected
    assert body["usage"] == usage(4)


# --- documents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RERANK_PATHS)
async def test_documents_come_best_first_with_their_places(path: str) -> None:
    documents = ["ab", {"text": "abcd"}, "a", "cdef"]
    body = answered(await post(1, path, query="q", documents=documents))
    assert body.pop("id").startswith("rerank-")
    assert body == {
        "model": "fake",
        "usage": {"prompt_tokens": 19, "total_tokens": 19},
        "results": [
            {"index": 1, "relevance_score": 6.0, "document": {"text": "abcd"}},
            {"index": 3, "relevance_score": 6.0, "document": {"text": "cdef"}},
            {"index": 0, "relevance_score": 4.0, "document": {"text": "ab"}},
            {"index": 2, "relevance_score": 3.0, "document": {"text": "a"}},
        ],
    }


@pytest.mark.parametrize("num_labels", [0, 1])
@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [
        ({}, {0: 3 + 2 + 4, 1: 6 + 8}),
        ({"max_tokens_per_doc": 0, "max_tokens_per_query": 0}, {0: 9, 1: 14}),
        ({"max_tokens_per_doc": 3}, {0: 3 + 2 + 3, 1: 6 + 7}),
        ({"max_tokens_per_query": 1}, {0: 1 + 2 + 4, 1: 4 + 6}),
        ({"max_tokens_per_doc": 1, "max_tokens_per_query": 2}, {0: 2 + 1 + 1, 1: 4 + 4}),
    ],
)
async def test_documents_and_queries_are_cut_to_their_own_limits(
    limits: dict[str, int], num_tokens: dict[int, int], num_labels: int
) -> None:
    texts = {
        "rerank": {"query": "abc", "documents": ["de", "fghi"]},
        "score": {"text_1": "abc", "text_2": ["de", "fghi"]},
    }
    for path, body in texts.items():
        answer = answered(await post(num_labels, f"/{path}", **body, **limits))
        assert answer["usage"]["total_tokens"] == num_tokens[num_labels]


@pytest.mark.parametrize("name", ["max_tokens_per_doc", "max_tokens_per_query"])
@pytest.mark.parametrize(
    ("value", "code"),
    [(-1, "integer_below_min_value"), (128, "integer_above_max_value"), (1.5, "invalid_type"), (True, "invalid_type")],
)
async def test_a_limit_on_texts_is_below_what_the_model_takes(name: str, value: Any, code: str) -> None:
    error = (await post(1, "/rerank", query="a", documents=["b"], **{name: value})).json()["error"]
    assert (error["param"], error["code"]) == (name, code)


@pytest.mark.parametrize(("top_n", "expected"), [(None, [1, 0, 2]), (0, [1, 0, 2]), (2, [1, 0]), (9, [1, 0, 2])])
async def test_top_n_limits_the_results_with_or_without_their_texts(top_n: int | None, expected: list[int]) -> None:
    documents = ["ab", "abcd", "a"]
    body = answered(await post(1, "/rerank", query="q", documents=documents, top_n=top_n, return_documents=False))
    assert [one["index"] for one in body["results"]] == expected
    assert all("document" not in one for one in body["results"])
    assert body["usage"]["total_tokens"] == 13


async def test_a_model_of_vectors_ranks_by_the_query_it_reads_once() -> None:
    engine = FakeEngineClient()
    body = answered(await call(app_of(engine), "POST", "/rerank", {"query": "q", "documents": ["a", "z", "m"]}))
    assert [one["index"] for one in body["results"]] == [1, 2, 0]
    assert body["usage"]["total_tokens"] == 4


async def test_many_documents_are_answered_with_a_bounded_number_in_flight() -> None:
    engine = FakeEngineClient(num_labels=1)
    documents = ["d" * (1 + index % 100) for index in range(1000)]
    body = answered(await call(app_of(engine), "POST", "/rerank", {"query": "q", "documents": documents, "top_n": 10}))
    assert [one["index"] for one in body["results"]] == [99 + 100 * index for index in range(10)]
    assert engine.max_num_running == MAX_NUM_IN_FLIGHT


# --- Cohere's embeddings --------------------------------------------------------------------------------------------


async def test_embeddings_come_in_the_form_of_cohere() -> None:
    texts, kinds = ["ab", "c"], ["float", "base64"]
    body = answered(await post(0, "/v2/embed", texts=texts, input_type="search_document", embedding_types=kinds))
    assert body.pop("id").startswith("embd-")
    encoded = body["embeddings"].pop("base64")
    assert [struct.unpack("<4f", base64.b64decode(one))[0] for one in encoded] == [2.0, 1.0]
    assert body == {
        "response_type": "embeddings_by_type",
        "embeddings": {"float": [[2.0, 97.0, 98.0, 98.0], [1.0, 99.0, 99.0, 99.0]]},
        "texts": texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 3}},
    }


async def test_without_an_input_type_texts_stay_as_they_are() -> None:
    body = answered(await post(0, "/v2/embed", texts=["ab"]))
    assert body["embeddings"] == {"float": [[2.0, 97.0, 98.0, 98.0]]}


async def test_a_query_gets_what_the_model_wants_before_it_and_is_cut_as_asked() -> None:
    for fields, expected in (
        ({"texts": ["ab"]}, [5.0, 113.0]),
        ({"texts": ["a" * 500]}, [128.0, 113.0]),
        ({"texts": ["a" * 500], "truncate": "START"}, [128.0, 97.0]),
    ):
        answer = await post(0, "/v2/embed", input_type="search_query", output_dimension=2, **fields)
        assert answered(answer)["embeddings"]["float"] == [expected]
    answer = await post(0, "/v2/embed", input_type="search_query", texts=["a" * 500], truncate="NONE")
    assert answer.json()["error"]["code"] == "context_length_exceeded"


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_labels", "path", "body", "param", "code"),
    [
        (0, "/classify", {"input": "a"}, "model", "unsupported_value"),
        (2, "/classify", {}, "input", "missing_required_parameter"),
        (2, "/classify", {"input": "a", "use_activation": 1}, "use_activation", "invalid_type"),
        (2, "/classify", {"input": "a", "activation": True}, "activation", "unsupported_parameter"),
        (2, "/classify", {"input": "a" * 129}, "input", "context_length_exceeded"),
        (0, "/pooling", {"input": "a", "task": "mystery"}, "task", "invalid_value"),
        (0, "/pooling", {"input": "a", "task": 5}, "task", "invalid_type"),
        (0, "/pooling", {"input": "a", "task": "classify"}, "model", "unsupported_value"),
        (2, "/pooling", {"input": "a", "dimensions": 1}, "dimensions", "invalid_value"),
        (0, "/pooling", {"input": "a", "encoding_format": "bytes"}, "encoding_format", "invalid_value"),
        (0, "/v2/embed", {"input_type": "clustering"}, "texts", "missing_required_parameter"),
        (0, "/v2/embed", {"texts": ["a"], "input_type": "image"}, "input_type", "invalid_value"),
        (0, "/v2/embed", {"texts": ["a"], "input_type": "clustering", "truncate": "MIDDLE"}, "truncate",
         "invalid_value"),
        (0, "/v2/embed", {"texts": ["a"], "input_type": "clustering", "embedding_types": ["float", "int8"]},
         "embedding_types[1]", "unsupported_value"),
        (0, "/v2/embed", {"texts": ["a"], "input_type": "clustering", "output_dimension": 9}, "output_dimension",
         "integer_above_max_value"),
        (0, "/v2/embed", {"texts": ["a"], "input_type": "clustering", "images": ["x"]}, "images",
         "unsupported_parameter"),
        (1, "/score", {}, "text_1", "missing_required_parameter"),
        (1, "/score", {"text_1": "a"}, "text_2", "missing_required_parameter"),
        (1, "/score", {"items": ["a"]}, "queries", "missing_required_parameter"),
        (1, "/score", {"text_1": "a", "text_2": []}, "text_2", "empty_array"),
        (1, "/score", {"text_1": 5, "text_2": "a"}, "text_1", "invalid_type"),
        (1, "/score", {"text_1": "a", "text_2": ["a", 5]}, "text_2[1]", "invalid_type"),
        (1, "/score", {"text_1": "a", "text_2": [{}]}, "text_2[0].text", "missing_required_parameter"),
        (1, "/score", {"text_1": "a", "text_2": [{"content": []}]}, "text_2[0].content", "empty_array"),
        (1, "/score", {"text_1": "a", "text_2": [{"content": 5}]}, "text_2[0].content", "invalid_type"),
        (1, "/score", {"text_1": "a", "text_2": {"content": "b", "text": "b"}}, "text_2.text", "invalid_value"),
        (1, "/score", {"text_1": "a", "text_2": {"content": [5]}}, "text_2.content[0]", "invalid_type"),
        (1, "/score", {"text_1": "a", "text_2": {"content": [{"type": "text"}]}}, "text_2.content[0].text",
         "missing_required_parameter"),
        (1, "/score", {"text_1": "a", "text_2": {"content": [{"type": "text", "text": 5}]}}, "text_2.content[0].text",
         "invalid_type"),
        (1, "/score", {"text_1": "a", "text_2": {"content": [{"type": "poem", "text": "a"}]}},
         "text_2.content[0].type", "invalid_value"),
        (1, "/score", {"text_1": "a", "text_2": {"content": [{"type": "file"}]}}, "text_2.content[0].type",
         "unsupported_parameter"),
        (1, "/score", {"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}},
         "text_2.content[0].image_url", "missing_required_parameter"),
        (1, "/score", {"text_1": PICTURE, "text_2": "a"}, "text_1.content[1].type", "unsupported_parameter"),
        (0, "/score", {"text_1": TEXTS, "text_2": "a", "max_tokens_per_query": 3}, "max_tokens_per_query",
         "unsupported_value"),
        (0, "/v2/embed", {"texts": [TEXTS], "input_type": "clustering"}, "texts[0].content", "unsupported_parameter"),
        (1, "/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "invalid_value"),
        (1, "/score", {"text_1": "a", "text_2": ["b", "c" * 200]}, "text_2[1]", "context_length_exceeded"),
        (1, "/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens",
         "integer_below_min_value"),
        (3, "/score", {"text_1": "a", "text_2": "b"}, "model", "unsupported_value"),
        (1, "/rerank", {"documents": ["a"]}, "query", "missing_required_parameter"),
        (1, "/rerank", {"query": ["a", "b"], "documents": ["a", "b"]}, "query", "invalid_type"),
        (1, "/rerank", {"query": "a"}, "documents", "missing_required_parameter"),
        (1, "/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents", "array_above_max_length"),
        (1, "/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "integer_below_min_value"),
        (1, "/rerank", {"query": "a", "documents": ["a"], "top_n": 1.5}, "top_n", "invalid_type"),
        (1, "/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields",
         "unsupported_parameter"),
        (1, "/rerank", {"query": "a", "documents": ["a"], "priority": 2**40}, "priority", "integer_above_max_value"),
        (1, "/rerank", {"query": "a", "documents": ["a"], "model": "other"}, None, "model_not_found"),
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
async def test_bad_requests_are_refused_by_field(
    num_labels: int, path: str, body: dict[str, Any], param: str | None, code: str
) -> None:
    answer = await post(num_labels, path, **body)
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (404 if code == "model_not_found" else 400, code)
    assert param is None or error["param"] == param


async def test_a_query_is_not_repeated_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MAX_NUM_CHARS", 100)
    documents = ["a"] * 10
    assert (await post(1, "/rerank", query="q" * 9, documents=documents)).status == 200
    error = (await post(1, "/rerank", query="q" * 10, documents=documents)).json()["error"]
    assert (error["param"], error["code"]) == ("documents", "request_budget_exceeded")
    assert (await post(0, "/rerank", query="q" * 10, documents=documents)).status == 200


async def test_a_client_that_leaves_aborts_its_documents() -> None:
    engine = FakeEngineClient(step_delay_s=60.0, num_labels=1)
    body = {"query": "q", "documents": ["a", "b", "c"]}
    await call(app_of(engine), "POST", "/rerank", body, disconnect_after_parts=0)
    await wait_until(lambda: len(engine.aborted_request_ids) == 3)
    assert engine.num_running == 0


async def test_unknown_fields_are_treated_as_elsewhere() -> None:
    engine = FakeEngineClient(num_labels=1)
    answer = await call(
        app_of(engine, is_strict_params=True), "POST", "/score", {"text_1": "a", "text_2": "b", "mystery": 1}
    )
    assert answer.json()["error"]["code"] == "unknown_parameter"


async def test_the_routes_are_documented() -> None:
    paths = answered(await call(app_of(FakeEngineClient()), "GET", "/openapi.json"))["paths"]
    for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", *RERANK_PATHS):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(PoolingFields.model_fields) <= set(schema["properties"])
