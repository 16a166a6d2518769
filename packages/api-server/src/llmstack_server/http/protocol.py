"""uvicorn's HTTP protocol with limits on headers, and on how long they may take to arrive."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from llmstack_server.http.errors import ErrorAnswer, headers_too_large, request_timeout

MAX_HEADER_BYTES = 64 << 10
MAX_NUM_HEADERS = 128
HEADERS_TIMEOUT_S = 15.0
LINGER_S = 1.0


class LimitedProtocol(HttpToolsProtocol):
    """One connection. uvicorn's own limits exist for its h11 protocol only: 20 MB of headers pass httptools."""

    headers_timeout_s = HEADERS_TIMEOUT_S
    max_header_bytes = MAX_HEADER_BYTES
    max_num_headers = MAX_NUM_HEADERS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._is_refused = False
        self._headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Starts waiting for the first headers."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes bytes; headers beyond the limit end the connection."""
        if self._is_refused:
            return
        if self._is_in_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._num_header_bytes > self.max_header_bytes:
            self._refuse(headers_too_large())

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_headers = True
        self._num_header_bytes = max(self._num_header_bytes, 1)  # a request has begun, if behind another one
        if self._headers_timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        """All headers are here: checks them before anything runs."""
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._stop_timer()
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self.max_header_bytes or len(self.headers) > self.max_num_headers:
            self._refuse(headers_too_large())
            raise httptools.HttpParserInvalidMethodError("headers beyond the limit")
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP get a minimal answer, unless a better one was given."""
        if not self._is_refused:
            self._is_refused = True
            super().send_400_response(msg)

    def _start_timer(self) -> None:
        self._headers_timer = self.loop.call_later(self.headers_timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _on_timeout(self) -> None:
        self._headers_timer = None
        if self._num_header_bytes:
            self._refuse(request_timeout())
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, answer: ErrorAnswer) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        content = answer.encoded()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "x-request-id": uuid.uuid4().hex,
            **answer.headers,
        }
        lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        self.transport.write(b"".join([STATUS_LINE[answer.status], *lines, b"\r\n", content]))
        # Closed at once, what the client still sends would reset the connection before it has read the answer.
        if self.transport.can_write_eof():  # not under TLS
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def limited_protocol(max_header_bytes: int, max_num_headers: int) -> type[LimitedProtocol]:
    """The protocol with limits of its own."""
    limits = {"max_header_bytes": max_header_bytes, "max_num_headers": max_num_headers}
    return type("LimitedProtocol", (LimitedProtocol,), limits)
