"""Completion of the OpenAPI document: what FastAPI does not see of the routes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from llmstack_server.web.openapi import ERROR_SCHEMA, error_responses
from llmstack_server.web.openapi_answers import add_answers
from llmstack_server.web.openapi_bodies import complete_body

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_ANY_BODY: Schema = {
    "type": "object",
    "anyOf": [{"required": [name]} for name in ("messages", "prompt", "input", "documents", "text_1")],
    "description": "a request to any generating or pooling route",
}
_EMPTY_PATHS = ("/ping", "/reset_prefix_cache", "/sleep", "/wake_up")
_TEXT_PATHS = ("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_FILE_PATHS = ("/v1/files/{file_id}/content", "/steps/log")
_TAGS = (
    ("/v1/responses", "Responses"), ("/v1/messages", "Messages"), ("/v1/models", "Models"), ("/v1/files", "Batches"),
    ("/v1/batches", "Batches"), ("/v1/chat", "Chat"), ("/v1/completions", "Completions"), ("/v1/embeddings", "Pooling"),
    ("/v2/embed", "Pooling"), ("/pooling", "Pooling"), ("/classify", "Pooling"), ("/score", "Pooling"),
    ("/rerank", "Pooling"), ("/v1/score", "Pooling"), ("/v1/rerank", "Pooling"), ("/v2/rerank", "Pooling"),
    ("/tokenize", "Tokenizer"), ("/detokenize", "Tokenizer"), ("/invocations", "Chat"),
)  # fmt: skip
_OTHER_TAG = "Server"
# Whose answers have an id, the paths and the parameter that take it, and where it is.
_LINKED = (
    ("/v1/responses", "post", "/v1/responses/{response_id}", "response_id", "$response.body#/id"),
    ("/v1/files", "post", "/v1/files/{file_id}", "file_id", "$response.body#/id"),
    ("/v1/batches", "post", "/v1/batches/{batch_id}", "batch_id", "$response.body#/id"),
    ("/v1/models", "get", "/v1/models/{model}", "model", "$response.body#/data/0/id"),
)
_ALLOW = {"Allow": {"description": "the methods that the path has", "schema": _STRING}}


def complete_document(document: Schema) -> Schema:
    """The document with required fields, errors, tags, summaries and links."""
    add_answers(document)
    for path, operations in document.get("paths", {}).items():
        for operation in operations.values():
            _complete(path, operation)
    document.get("components", {}).get("schemas", {}).pop("HTTPValidationError", None)
    document.get("components", {}).get("schemas", {}).pop("ValidationError", None)
    for path, method, prefix, parameter, source in _LINKED:
        operation = document.get("paths", {}).get(path, {}).get(method)
        if operation is not None:
            operation["responses"]["200"]["links"] = dict(_links(document, prefix, parameter, source))
    return document


def _complete(path: str, operation: Schema) -> None:
    operation["tags"] = [next((tag for prefix, tag in _TAGS if path.startswith(prefix)), _OTHER_TAG)]
    text = " ".join(str(operation.get("description", operation["summary"])).split())
    operation["summary"] = str(re.split(r"[.:;] |\.$", text)[0])
    responses = operation["responses"]
    responses.pop("422", None)  # what FastAPI finds wrong in a query is a 400
    has_query = any(parameter["in"] == "query" for parameter in operation.get("parameters", ()))
    of_input = (400, 408, 413, 415) if _has_body(path, operation) else (400,) * has_query
    for status in (401, 403, 404, 429, 500, 503, *of_input):
        if str(status) not in responses:
            responses[str(status)] = error_responses(status)[status]
    content = {"application/json": {"schema": ERROR_SCHEMA}}
    responses["405"] = {"description": "a method that the path does not have", "content": content, "headers": _ALLOW}
    if path in _EMPTY_PATHS:
        responses["200"].pop("content", None)
    elif path in _TEXT_PATHS:
        responses["200"]["content"] = {"text/plain": {"schema": _STRING}}
    elif path in _FILE_PATHS:
        responses["200"]["content"] = {"application/octet-stream": {"schema": _STRING | {"format": "binary"}}}


def _has_body(path: str, operation: Schema) -> bool:
    """Whether it has a body, whose schema is completed."""
    if path == "/invocations":
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": dict(_ANY_BODY)}}}
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if schema is None:
        return "requestBody" in operation
    if "properties" in schema:
        complete_body(path, schema)
    return True


def _links(document: Schema, prefix: str, parameter: str, source: str) -> Iterator[tuple[str, Schema]]:
    """Links from an answer with an id to the routes that take the id."""
    for path, operations in document["paths"].items():
        if path.startswith(prefix):
            for operation in operations.values():
                target = operation["operationId"]
                yield target, {"operationId": target, "parameters": {parameter: source}}
