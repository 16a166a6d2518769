"""`text.format` as a constraint on the output."""

from __future__ import annotations

from typing import Any

from llmstack_llm import request_errors
from llmstack_server.http.errors import missing_parameter
from llmstack_types import StructuredOutputsParams


def structured_outputs(text_format: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """The constraint; None for plain text. A schema holds whether or not it is `strict`.

    Raises:
        InvalidRequestError: Not one of the API's formats.
    """
    if text_format is None:
        return None
    kind = text_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise request_errors.invalid_value("text.format.type", "expected 'text', 'json_schema' or 'json_object'")
    if not isinstance(text_format.get("name"), str):
        raise missing_parameter("text.format.name")
    schema = text_format.get("schema")
    if schema is None:
        raise missing_parameter("text.format.schema")
    if not isinstance(schema, dict):
        raise request_errors.invalid_type("text.format.schema", "an object", schema)
    return StructuredOutputsParams(json=schema)
