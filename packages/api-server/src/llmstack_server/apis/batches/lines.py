"""Lines of a batch: requests, answers and faults."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_LINE_BYTES = 16 << 20
MAX_CUSTOM_ID_CHARS = 512
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which cannot be written to a file
_ROUTE = re.compile(r"/[!-~]{0,511}")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of the input.

    Attributes:
        line: The line number in the file, from 1.
        url: The path of the route, such as `/v1/chat/completions`.
    """

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchFault:
    """A line of the input that is not a request.

    Attributes:
        custom_id: None where the line has none.
    """

    line: int
    custom_id: str | None
    code: str
    message: str

    def encode(self) -> bytes:
        """The line of the output, with an error in place of the response."""
        error = {"code": self.code, "message": self.message, "line": self.line}
        return _encode({"id": _new_id(), "custom_id": self.custom_id, "response": None, "error": error})


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer of a server.

    Attributes:
        body: The decoded JSON body.
    """

    status: int
    request_id: str
    body: Any

    def encode(self, request: BatchRequest) -> bytes:
        """The line of the output, with the response."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        return _encode({"id": _new_id(), "custom_id": request.custom_id, "response": response, "error": None})


def read_lines(file: BinaryIO) -> Iterator[BatchRequest | BatchFault]:
    """The requests of a batch file in order; empty lines are skipped, invalid lines are faults."""
    number = 0
    seen: set[str] = set()
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            _skip_line(file, line)
            yield BatchFault(number, None, "line_too_long", f"The line is longer than {MAX_LINE_BYTES} bytes.")
        elif line.strip():
            parsed = parse_line(number, line)
            if isinstance(parsed, BatchRequest):
                if parsed.custom_id in seen:
                    message = "An earlier line has this custom_id."
                    parsed = BatchFault(number, parsed.custom_id, "duplicate_custom_id", message)
                else:
                    seen.add(parsed.custom_id)
            yield parsed


def parse_line(number: int, line: bytes) -> BatchRequest | BatchFault:
    """The request of one line, or its fault; the server checks the body."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return BatchFault(number, None, "invalid_json_line", "The line is not JSON.")
    if not isinstance(fields, dict):
        return BatchFault(number, None, "invalid_json_line", "The line is not a JSON object.")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS or _SURROGATE.search(custom_id):
        message = f"'custom_id' must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        return BatchFault(number, None, "invalid_custom_id", message)
    return _checked_request(number, custom_id, fields)


def _checked_request(number: int, custom_id: str, fields: dict[str, Any]) -> BatchRequest | BatchFault:
    url, body = fields.get("url"), fields.get("body")
    fault = None
    if fields.get("method") != "POST":
        fault = ("invalid_method", "'method' must be 'POST'.")
    elif not isinstance(url, str) or not _ROUTE.fullmatch(url):
        fault = ("invalid_url", "'url' must be the path of a route, such as '/v1/chat/completions'.")
    elif not isinstance(body, dict):
        fault = ("invalid_body", "'body' must be a JSON object.")
    elif body.get("stream"):
        fault = ("unsupported_parameter", "'stream' is not available in a batch.")
    if fault is not None:
        return BatchFault(number, custom_id, *fault)
    return BatchRequest(number, custom_id, str(url), dict(body or {}))


def _skip_line(file: BinaryIO, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = file.readline(MAX_LINE_BYTES)


def _encode(fields: dict[str, Any]) -> bytes:
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace") + b"\n"


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
