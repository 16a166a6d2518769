"""Server-sent events with one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llmstack_server.web.errors import ErrorAnswer

Events = bytes | list[bytes]
"""One event, or several, or none where there are no bytes."""

DONE = b"data: [DONE]\n\n"

encode_string = json.encoder.encode_basestring
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def frame(text: str) -> bytes:
    """An event without a name."""
    # A lone surrogate, which no UTF-8 decoder yields, must not end a stream.
    return f"data: {text}\n\n".encode("utf-8", "replace")


def frame_named(event: Mapping[str, object]) -> bytes:
    """An event named by its `type`, as in the Responses and Messages APIs."""
    return f"event: {event['type']}\ndata: {encode_json(event)}\n\n".encode("utf-8", "replace")


def numbered_error_event(error: ErrorAnswer, sequence_number: int) -> bytes:
    """The event `error` of the Responses API: it ends what a reader gets, and not the response."""
    return frame_named({
        "type": "error", "sequence_number": sequence_number,
        "code": error.code, "message": error.message, "param": error.param,
    })  # fmt: skip
