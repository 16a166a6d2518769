"""Lines of a batch: requests, answers and faults."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

from llmstack_server.web.errors import HTTPError
from llmstack_server.web.json_body import decode_object, decoding
from llmstack_server.web.json_pieces import PIECE_BYTES
from llmstack_server.web.json_structure import JSONLimits

MAX_BODY_BYTES = 16 << 20
# What a line has beside the body: its other fields.
_OTHER_BYTES = 64 << 10
MAX_CUSTOM_ID_CHARS = 512
_ROUTE = re.compile(r"/[!-~]{0,511}")
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_PARTS_PER_STEP = 4096
# Vectors that an encoder makes of a second of sound, which is what an answer to sound counts.
_TOKENS_PER_SECOND = 50


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of the input.

    Attributes:
        line: The line number in the file, from 1.
        url: The path of the route, such as `/v1/chat/completions`.
        content: The body, as JSON: decoded, a line may take many times its length in memory.
        media_type: Of the body.
    """

    line: int
    custom_id: str
    url: str
    content: bytes
    media_type: str = "application/json"


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
        body: The decoded JSON body, or the text of one that is plain.
    """

    status: int
    request_id: str
    body: Any

    @property
    def error_code(self) -> str:
        """The code of an error; empty where it has none."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("code") or "") if isinstance(error, dict) else ""

    @property
    def num_tokens(self) -> int:
        """The tokens that it has cost; the characters of a plain text, and 0 where nothing tells."""
        if isinstance(self.body, str):
            return len(self.body)
        usage = self.body.get("usage") if isinstance(self.body, dict) else None
        if not isinstance(usage, dict):
            return 0
        if usage.get("type") == "duration" and isinstance(usage.get("seconds"), int):
            return _TOKENS_PER_SECOND * int(usage["seconds"])
        values = usage.values()
        return max((value for value in values if isinstance(value, int)), default=0)

    def encode(self, request: BatchRequest) -> bytes:
        """The line of the output, with the response."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        return _encode({"id": _new_id(), "custom_id": request.custom_id, "response": response, "error": None})


def read_lines(file: BinaryIO, max_body_bytes: int = MAX_BODY_BYTES) -> Iterator[BatchRequest | BatchFault]:
    """The requests of a batch file in order; empty lines are skipped, invalid lines are faults."""
    return (item for item in line_steps(file, max_body_bytes) if item is not None)


def line_steps(file: BinaryIO, max_body_bytes: int = MAX_BODY_BYTES) -> Iterator[BatchRequest | BatchFault | None]:
    """Reads the lines in steps of a few milliseconds; None after each step that completes no line.

    A line passes the limits of a request's body, so that none takes long to decode or much memory.
    """
    number, max_bytes = 0, max_body_bytes + _OTHER_BYTES
    limits = JSONLimits.of_body(max_body_bytes)
    seen: set[bytes] = set()
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            yield from _skip_line(file, line)
            yield BatchFault(number, None, "line_too_long", f"The line is longer than {max_bytes} bytes.")
        elif line.strip():
            parsed = yield from _parse(number, line.strip(), limits)
            digest = None if parsed.custom_id is None else digest_of(parsed.custom_id)
            if isinstance(parsed, BatchRequest) and digest in seen:
                message = "An earlier line has this custom_id."
                parsed = BatchFault(number, parsed.custom_id, "duplicate_custom_id", message)
            elif isinstance(parsed, BatchRequest) and digest is not None:
                seen.add(digest)
            yield parsed
        else:
            yield None


def digest_of(custom_id: str) -> bytes:
    """A digest of a custom id: 50,000 long ones would fill the memory."""
    return blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _parse(number: int, line: bytes, limits: JSONLimits) -> Generator[None, None, BatchRequest | BatchFault]:
    """The request of one line, or its fault; the server checks the body."""
    try:
        if len(line) > PIECE_BYTES:
            document = decoding(line, limits)
            yield from document.run()
            fields = document.value
        else:
            fields = decode_object(line, limits)
    except HTTPError as error:
        return BatchFault(number, None, "invalid_json_line", f"The line cannot be read. {error.answer.message}")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"'custom_id' must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        return BatchFault(number, None, "invalid_custom_id", message)
    fault = _fault_of(fields)
    if fault is not None:
        return BatchFault(number, custom_id, *fault)
    content = yield from _encode_body(fields["body"])
    return BatchRequest(number, custom_id, fields["url"], content)


def _fault_of(fields: dict[str, object]) -> tuple[str, str] | None:
    url, body = fields.get("url"), fields.get("body")
    if fields.get("method") != "POST":
        return "invalid_method", "'method' must be 'POST'."
    if not isinstance(url, str) or not _ROUTE.fullmatch(url):
        return "invalid_url", "'url' must be the path of a route, such as '/v1/chat/completions'."
    if not isinstance(body, dict):
        return "invalid_body", "'body' must be a JSON object."
    if body.get("stream"):
        return "unsupported_parameter", "'stream' is not available in a batch."
    return None


def _encode_body(body: dict[str, object]) -> Generator[None, None, bytes]:
    content = bytearray()
    for number, part in enumerate(_ENCODER.iterencode(body)):
        content += part.encode()
        if not number % _PARTS_PER_STEP:
            yield
    return bytes(content)


def _skip_line(file: BinaryIO, line: bytes) -> Iterator[None]:
    while line and not line.endswith(b"\n"):
        yield
        line = file.readline(_OTHER_BYTES)


def _encode(fields: dict[str, object]) -> bytes:
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace") + b"\n"


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
