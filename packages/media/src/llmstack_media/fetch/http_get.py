"""One GET request over an open connection: status, headers, a bounded body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass

from llmstack_media.errors import fetch_failed
from llmstack_media.fetch.data_urls import check_length
from llmstack_media.fetch.policy import Target
from llmstack_types import InvalidRequestError

Reserve = Callable[[int], None]
"""Counts bytes that are about to be read, and raises where there must not be so many."""
_MAX_HEAD_BYTES = 32_768
_MAX_LINE_BYTES = 1024
_MAX_INTERIM = 4
_PIECE_BYTES = 1 << 16
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?")
_TYPE = re.compile(r"[A-Za-z0-9.+-]{1,40}/[A-Za-z0-9.+-]{1,60}")


@dataclass(frozen=True, slots=True)
class Response:
    """The head of an answer. Names of headers are in lower case; of several with one name the last counts."""

    status: int
    headers: dict[str, str]

    @property
    def described(self) -> str:
        """Status and type for a message; no other text of the server's."""
        found = _TYPE.match(self.headers.get("content-type", ""))
        return f"status {self.status}" + (f" and type {found[0]}" if found else "")


async def send_get(writer: asyncio.StreamWriter, target: Target) -> None:
    """Sends the request. It has no credentials and no cookies."""
    lines = (
        f"GET {target.path} HTTP/1.1", f"Host: {target.host_header}", "User-Agent: llmstack", "Accept: */*",
        "Accept-Encoding: identity", "Connection: close", "", "",
    )  # fmt: skip
    writer.write("\r\n".join(lines).encode("ascii"))
    await writer.drain()


async def read_head(reader: asyncio.StreamReader) -> Response:
    """Reads status and headers.

    Raises:
        InvalidRequestError: They are no HTTP, or too long.
    """
    for _ in range(_MAX_INTERIM):
        response = _parsed_head(await _head_bytes(reader))
        if response.status >= 200:
            return response
    raise _not_http()


async def read_body(
    reader: asyncio.StreamReader, response: Response, max_bytes: int, reserve: Reserve = lambda num_bytes: None
) -> bytes:
    """Reads a body in either of its forms.

    `reserve` is called before bytes are read: with all of them where their number is declared, else with each piece's.

    Raises:
        InvalidRequestError: It is longer than allowed, compressed, or ends too early. Also what `reserve` raises.
    """
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise fetch_failed("The server of this URL answered with compressed content, which it was not asked for")
    coding = response.headers.get("transfer-encoding", "").lower()
    if coding:
        if coding != "chunked":
            raise _not_http()
        return await _chunked(reader, max_bytes, reserve)
    declared = response.headers.get("content-length")
    if declared is None:
        return await _to_the_end(reader, max_bytes, reserve)
    if not (declared.isascii() and declared.isdigit() and len(declared) < 20):
        raise _not_http()
    check_length(int(declared), max_bytes)
    reserve(int(declared))
    return await reader.readexactly(int(declared))


async def _head_bytes(reader: asyncio.StreamReader) -> bytes:
    lines: list[bytes] = []
    total = 0
    while True:
        line = await reader.readline()
        total += len(line)
        if not line.endswith(b"\n") or total > _MAX_HEAD_BYTES:
            raise _not_http()
        if line in (b"\r\n", b"\n"):
            return b"".join(lines)
        lines.append(line)


def _parsed_head(text: bytes) -> Response:
    first, *rest = text.splitlines() or [b""]
    found = _STATUS_LINE.fullmatch(first)
    if found is None:
        raise _not_http()
    headers = {}
    for line in rest:
        name, colon, value = line.partition(b":")
        if not colon or not name.strip():
            raise _not_http()
        headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()
    return Response(int(found[1]), headers)


async def _to_the_end(reader: asyncio.StreamReader, max_bytes: int, reserve: Reserve) -> bytes:
    pieces: list[bytes] = []
    total = 0
    while piece := await reader.read(_PIECE_BYTES):
        total += len(piece)
        check_length(total, max_bytes)
        reserve(len(piece))
        pieces.append(piece)
    return b"".join(pieces)


async def _chunked(reader: asyncio.StreamReader, max_bytes: int, reserve: Reserve) -> bytes:
    pieces: list[bytes] = []
    total = 0
    while True:
        line = await reader.readline()
        size = line.partition(b";")[0].strip()
        if len(line) > _MAX_LINE_BYTES or not re.fullmatch(rb"[0-9A-Fa-f]{1,8}", size):
            raise _not_http()
        length = int(size, 16)
        if length == 0:
            return b"".join(pieces)
        total += length
        check_length(total, max_bytes)
        reserve(length)
        pieces.append(await reader.readexactly(length))
        if await reader.readexactly(2) != b"\r\n":
            raise _not_http()


def _not_http() -> InvalidRequestError:
    return fetch_failed("The server of this URL did not answer in HTTP")
