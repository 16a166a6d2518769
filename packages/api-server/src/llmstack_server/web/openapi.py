"""Descriptions of bodies and answers for the OpenAPI document."""

from __future__ import annotations

from collections.abc import ItemsView
from typing import Any

from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

STREAM: Responses = {
    200: {"description": "the answer, or its events", "content": {"application/json": {}, "text/event-stream": {}}}
}


def error_responses(*statuses: int, schema: dict[str, Any] = ERROR_SCHEMA) -> Responses:
    """Descriptions of errors by their status."""
    content = {"application/json": {"schema": schema}}
    return {status: {"description": "an error of the API's one shape", "content": content} for status in statuses}


# Errors that any route with a body may answer.
REQUEST_ERRORS = error_responses(400, 401, 404, 413, 415, 500, 503)
GENERATION_RESPONSES = STREAM | REQUEST_ERRORS


class RequestBody(dict[str, Any]):
    """The `requestBody` of an operation. Its schema takes ten milliseconds, so it is made when the document is."""

    def __init__(self, model: type[BaseModel]) -> None:
        super().__init__(requestBody={})
        self._model = model

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # dict's own view has no public name
        """What FastAPI puts into its description of the operation."""
        content = {"application/json": {"schema": _inlined_schema(self._model)}}
        return {"requestBody": {"required": True, "content": content}}.items()


def _inlined_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of a request body, with nested models inlined: FastAPI does not know these models."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    for field in schema["properties"].values():
        for option in field.get("anyOf", ()):
            if "$ref" in option:
                option.update(definitions[option.pop("$ref").rpartition("/")[2]])
    return schema
