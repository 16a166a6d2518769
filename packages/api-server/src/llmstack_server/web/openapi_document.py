"""Completion of the OpenAPI document: what FastAPI does not see of the routes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from fastapi.routing import APIRoute

from llmstack_server.web.openapi import EVENTS, TEXT, Schema, error_responses
from llmstack_server.web.openapi_answers import schema_of
from llmstack_server.web.routes import Content, RouteSpec, RouteTable

_ALLOW = {"Allow": {"description": "the methods that the path has", "schema": TEXT}}
_CONTENT: Mapping[Content, Schema] = {
    Content.TEXT: {"text/plain": {"schema": TEXT}},
    Content.FILE: {"application/octet-stream": {"schema": TEXT | {"format": "binary"}}},
}
# Before OpenAPI 3.2 the schema of a stream is read as that of each of its events.
_EVENT: Final[Schema] = {
    "type": "object",
    "description": "server-sent events, each of this form; `data` is an object of the API as JSON, or `[DONE]`",
    "properties": {"event": TEXT, "data": TEXT, "id": TEXT, "retry": {"type": "integer", "minimum": 0}},
    "required": ["data"],
}


def complete_document(document: Schema, table: RouteTable) -> Schema:
    """The document with the declarations of the routes: fields, queries, answers, errors, tags, summaries and links."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    operations = document.get("paths", {})
    documented = [
        (operations[route.path_format][method.lower()], spec)
        for route, spec in table.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in sorted(route.methods or ())
    ]
    for operation, spec in documented:
        _complete(operation, spec, schemas)
        if spec.id_of_answer is not None:
            operation["responses"]["200"]["links"] = dict(_links(operations, *spec.id_of_answer))
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    return document


def _complete(operation: Schema, spec: RouteSpec, schemas: dict[str, Schema]) -> None:
    operation["tags"] = [spec.tag]
    text = " ".join(str(operation.get("description", operation["summary"])).split())
    operation["summary"] = str(re.split(r"[.:;] |\.$", text)[0])
    for name, (schema, meaning) in (spec.query or {}).items():
        operation.setdefault("parameters", []).append(
            {"name": name, "in": "query", "required": False, "description": meaning, "schema": schema}
        )
    if spec.body is not None:
        content = {spec.body.media_type: {"schema": spec.body.schema()}}
        operation["requestBody"] = {"required": True, "content": content}
    responses = operation["responses"]
    responses.pop("422", None)  # what FastAPI finds wrong in a query is a 400
    _complete_answer(responses["200"], spec, schemas)
    has_query = any(parameter["in"] == "query" for parameter in operation.get("parameters", ()))
    of_input = (400, 408, 413, 415) if "requestBody" in operation else (400,) * has_query
    statuses = {401, 403, 404, 405, 429, 500, 503, *of_input, *spec.statuses, *spec.errors.statuses}
    for status, response in error_responses(*sorted(statuses), schema=spec.errors.schema).items():
        responses.setdefault(str(status), response)
    responses["405"] = {
        **responses["405"], "description": "a method that the path does not have", "headers": _ALLOW,
    }  # fmt: skip


def _complete_answer(answer: Schema, spec: RouteSpec, schemas: dict[str, Schema]) -> None:
    if isinstance(spec.answer, Content):
        answer.pop("content", None)
        if spec.answer in _CONTENT:
            answer["content"] = dict(_CONTENT[spec.answer])
    elif spec.answer is not None:
        answer["content"]["application/json"]["schema"] = schema_of(spec.answer, schemas)
    if spec.streams:  # each line has the form of the whole
        whole = answer["content"]["application/json"].get("schema", {})
        answer["content"][spec.stream_type]["schema"] = dict(_EVENT if spec.stream_type == EVENTS else whole)


def _links(operations: Schema, parameter: str, source: str) -> Iterator[tuple[str, Schema]]:
    """Links from an answer with an id to the routes that take the id."""
    for path, methods in operations.items():
        if f"{{{parameter}}}" in path:
            for operation in methods.values():
                target = operation["operationId"]
                yield target, {"operationId": target, "parameters": {parameter: source}}
