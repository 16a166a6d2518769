"""The OpenAPI document says what the server does."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state

METHODS = {"get", "post", "delete", "put"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_app(ready_state(FakeEngineClient(), HTTPConfig(enable_control_routes=True))).openapi()


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
    assert chat["properties"]["messages"]["minItems"] == chat["properties"]["tools"]["minItems"] == 1


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
