"""Parser of server-sent events, one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from llmstack_command.errors import ApiError

MAX_EVENT_BYTES = 4 << 20
_PREFIX = b"data:"
_DONE = b"[DONE]"


class LineReader(Protocol):
    """A stream that is read line by line, such as an HTTP response."""

    def readline(self, limit: int = -1, /) -> bytes:
        """The next line with its end, at most `limit` bytes; empty at the end of the stream."""
        ...


def read_events(stream: LineReader) -> Iterator[dict[str, Any]]:
    """The events up to `[DONE]`.

    Raises:
        ApiError: The stream ends early, has another format, or reports a failed request.
    """
    while line := stream.readline(MAX_EVENT_BYTES):
        if not line.startswith(_PREFIX):
            continue  # the empty line between events, a comment that keeps the connection alive
        payload = line[len(_PREFIX) :].strip()
        if payload == _DONE:
            return
        yield _decode(payload)
    raise ApiError("the answer is incomplete: the server closed the connection")


def _decode(payload: bytes) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError:
        raise ApiError("the answer is not a stream of the OpenAI API: an event is not JSON") from None
    if not isinstance(event, dict):
        raise ApiError("the answer is not a stream of the OpenAI API: an event is not an object")
    if event.get("error"):
        message, code = error_text(event)
        raise ApiError(message or "the request failed", code)
    return event


def error_text(body: object) -> tuple[str, str | None]:
    """The message, on one line, and the code of an error's body; the message is empty if there is none."""
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, str):
        return " ".join(error.split()), None
    if not isinstance(error, dict):
        return "", None
    code = error.get("code")
    return " ".join(str(error.get("message") or "").split()), code if isinstance(code, str) else None
