"""The OpenAPI document says what the server does."""

from __future__ import annotations

import dataclasses
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from llmstack_server.apis.openai.protocol import ChatCompletionRequest
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state

METHODS = {"get", "post", "delete", "put"}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    http = HTTPConfig(enable_control_routes=True, state_dir=str(tmp_path_factory.mktemp("state")))
    state = ready_state(FakeEngineClient(), http)
    state.config = dataclasses.replace(state.config, deployment_secret=b"of all processes")
    return build_app(state).openapi()


def test_schemas_are_made_only_when_the_document_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[type[BaseModel]] = []
    make = BaseModel.model_json_schema.__func__
    monkeypatch.setattr(
        BaseModel, "model_json_schema", classmethod(lambda cls, **options: made.append(cls) or make(cls, **options))
    )
    app = build_app(ready_state(FakeEngineClient()))
    assert made == []
    app.openapi()
    assert ChatCompletionRequest in made


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, one) for path, entry in document["paths"].items() for method, one in entry.items()]


def test_every_operation_has_a_tag_a_summary_and_its_errors(document: dict[str, Any]) -> None:
    found = operations(document)
    assert len(found) > 30
    for path, method, operation in found:
        assert method in METHODS
        assert len(operation["tags"]) == 1
        assert operation["summary"]
        assert "422" not in operation["responses"]
        assert {"200", "404", "405", "500", "503"} <= operation["responses"].keys(), path
        assert "Allow" in operation["responses"]["405"]["headers"]
        if any(parameter["in"] == "query" for parameter in operation.get("parameters", ())):
            assert "400" in operation["responses"], path
        if "requestBody" in operation:
            assert operation["requestBody"]["required"] is True
            assert {"400", "413", "415"} <= operation["responses"].keys(), path
    ids = [operation["operationId"] for _, _, operation in found]
    assert len(set(ids)) == len(ids)


def test_required_fields_are_named_and_not_null(document: dict[str, Any]) -> None:
    for path, name in (
        ("/v1/chat/completions", "messages"), ("/v1/completions", "prompt"), ("/v1/responses", "input"),
        ("/v1/messages", "max_tokens"), ("/rerank", "query"), ("/detokenize", "tokens"),
    ):  # fmt: skip
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert name in schema["required"]
        field = schema["properties"][name]
        assert {"type": "null"} not in field.get("anyOf", [])
        assert "default" not in field
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["properties"]["messages"]["minItems"] == chat["properties"]["tools"]["anyOf"][0]["minItems"] == 1


def test_answers_that_are_not_json_are_described(document: dict[str, Any]) -> None:
    assert document["paths"]["/metrics"]["get"]["responses"]["200"]["content"].keys() == {"text/plain"}
    for path, method in (("/ping", "get"), ("/ping", "post"), ("/reset_prefix_cache", "post")):
        assert "content" not in document["paths"][path][method]["responses"]["200"]
    links = document["paths"]["/v1/responses"]["post"]["responses"]["200"]["links"]
    targets = {operation["operationId"] for path, _, operation in operations(document) if "{response_id}" in path}
    assert {link["operationId"] for link in links.values()} == targets
    [link] = document["paths"]["/v1/models"]["get"]["responses"]["200"]["links"].values()
    assert link["parameters"] == {"model": "$response.body#/data/0/id"}


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/responses/resp_1", "DELETE, GET"),
        ("/ping", "GET, HEAD, POST"),
        ("/v1/completions", "POST"),
        ("/v1/responses/input_tokens", "POST"),
    ],
)
async def test_the_answer_to_a_wrong_method_names_all_methods(path: str, allowed: str) -> None:
    answer = await call(build_app(ready_state(FakeEngineClient())), "PATCH", path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)


def body_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


TOOL = {"type": "function", "function": {"name": "f"}}
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, [
            {"messages": []}, {"messages": [{}]}, {"messages": [{"role": "user"}]},
            {"messages": [USER], "deadline_ms": 0}, {"messages": [USER], "tools": []},
            {"messages": [USER], "tools": [{}]}, {"messages": [USER], "tools": [{**TOOL, "type": "x"}]},
            {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a b"}}]},
            {"messages": [USER], "stream_options": {}}, {"messages": [USER], "stream": False, "stream_options": {}},
            {"messages": [USER], "n": 0}, {"messages": [USER], "n": 129}, {"messages": [USER], "top_p": 0},
        ]),
        ("/v1/chat/completions", {"messages": [{"role": "assistant"}, USER], "tools": [TOOL], "stream": True,
                                  "stream_options": {}, "deadline_ms": 1}, []),
        ("/v1/completions", {"prompt": [[1, 2]]}, [{"prompt": []}, {"prompt": "a", "stream_options": {}}]),
        ("/v1/embeddings", {"messages": [USER]}, [{"messages": []}, {}, {"input": None}]),
        ("/v1/embeddings", {"input": ["a"]}, [{"input": []}]),
        ("/v1/batches", {"input_file_id": "f", "endpoint": "/v1/embeddings", "completion_window": "24h"}, [
            {"input_file_id": "f", "endpoint": "/v1/x", "completion_window": "24h"},
            {"input_file_id": "f", "endpoint": None, "completion_window": "24h"},
            {"endpoint": "/v1/embeddings", "completion_window": "24h"},
        ]),
        ("/v1/responses", {"input": "a", "tools": [{"type": "custom", "name": "w"}]}, [
            {"input": []}, {"input": "a", "tools": [{"name": "w"}]}, {"input": "a", "stream_options": {}},
        ]),
        ("/v1/messages", {"messages": [USER], "max_tokens": 1}, [
            {"messages": [{}], "max_tokens": 1}, {"messages": [USER], "max_tokens": 0},
            {"messages": [USER], "max_tokens": 1, "tools": [{"name": "f"}]},
        ]),
        ("/rerank", {"query": "a", "documents": [{"text": "b"}]}, [{"query": "a", "documents": [{}]}]),
        ("/score", {"queries": "a", "items": ["b"]}, [{"items": ["b"]}, {"queries": None, "items": ["b"]}]),
        ("/v1/estimate", {"prompt_tokens": 1}, [{}, {"prompt_tokens": 1, "deadline_ms": 0}]),
        ("/invocations", {"prompt": "a"}, [{"": []}]),
    ],
)  # fmt: skip
def test_bodies_that_the_server_refuses_are_not_allowed(
    document: dict[str, Any], path: str, right: dict[str, Any], wrong: list[dict[str, Any]]
) -> None:
    schema = jsonschema.Draft202012Validator(body_of(document, path))
    schema.validate(right)
    for body in wrong:
        assert not schema.is_valid(body), body
