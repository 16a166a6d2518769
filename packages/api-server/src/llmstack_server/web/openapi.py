"""Parts of descriptions of queries and answers for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llmstack_types.json_values import JSONObject

Schema = JSONObject
Responses = dict[int | str, JSONObject]

NUMBER: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
TEXT: Final[Schema] = {"type": "string"}
ORDER: Final = ({"type": "string", "enum": ["asc", "desc"], "default": "desc"}, "the newest first, or the oldest")

EVENTS: Final = "text/event-stream"
"""A stream of server-sent events."""
LINES: Final = "application/x-ndjson"
"""A stream of lines with one object each."""


def stream_responses(media_type: str) -> Responses:
    """The description of an answer that may be a stream of this type."""
    what = "events" if media_type == EVENTS else "parts, in lines"
    return {200: {"description": f"the answer, or its {what}", "content": {"application/json": {}, media_type: {}}}}


def page_of(default: int, maximum: int, things: str) -> tuple[Schema, str]:
    """The parameter `limit` of a list."""
    return {"type": "integer", "minimum": 1, "maximum": maximum, "default": default}, f"{things} of a page"


def error_responses(*statuses: int, schema: Mapping[str, object]) -> Responses:
    """Descriptions of errors by their status."""
    content = {"application/json": {"schema": dict(schema)}}
    return {status: {"description": "an error of the API's one shape", "content": content} for status in statuses}
