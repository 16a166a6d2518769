"""HTTP protocol of uvicorn with limits on the size and the arrival of requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from llmstack_server.options.config import HTTPConfig
from llmstack_server.serving.early_answers import EagerLoop, answering, waited_s
from llmstack_server.serving.early_refusals import EarlyRefusal
from llmstack_server.serving.send_timer import TimedSending
from llmstack_server.web.body import LINGER_BYTES, LINGER_S
from llmstack_server.web.errors import (
    ErrorAnswer,
    expectation_failed,
    headers_too_large,
    invalid_host,
    invalid_http,
    request_timeout,
)
from llmstack_server.web.keep_alive import PART_WRITER, Flow
from llmstack_server.web.queue_gate import RECEIVED_S

MAX_HEADER_BYTES = 64 << 10
MAX_NUM_HEADERS = 128
HEADERS_TIMEOUT_S = 15.0
REQUEST_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 60.0
REFUSAL_LINGER_S = 1.0

MAX_TRAILER_BYTES = 8 << 10
"""Names and values of the trailers of a chunked body. They are dropped; no client of this API sends any."""

MAX_FRAMING_BYTES = 64 << 10
MAX_FRAMING_PER_BODY_BYTE = 8
"""Bytes that are no part of a body: sizes and extensions of chunks, trailers. A chunk of one byte has a frame of 5."""


MAX_NUM_PIPELINED = 32
"""Requests that wait for the answers before theirs. One piece of 256 KiB may hold 9,000 of 30 bytes."""

_BLANKS = (b" ", b"\t")


class LimitedProtocol(TimedSending, HttpToolsProtocol):
    """One connection with limits. uvicorn has such limits for h11 only; httptools accepts 20 MB of headers.

    Every byte between the beginning and the end of a request counts: the headers against their limit, the body against
    that of the application, and all else against `MAX_FRAMING_BYTES`. One deadline holds for the whole request.
    Requests that come before the answers to earlier ones wait, at most `MAX_NUM_PIPELINED` of them.
    A client that reads nothing of its answer for `send_timeout_s` is cut off, which aborts its request.
    """

    headers_timeout_s = HEADERS_TIMEOUT_S
    request_timeout_s = REQUEST_TIMEOUT_S
    send_timeout_s = SEND_TIMEOUT_S
    refusal_linger_s = REFUSAL_LINGER_S
    linger_s = LINGER_S
    max_header_bytes = MAX_HEADER_BYTES
    max_num_headers = MAX_NUM_HEADERS
    early_refusal: EarlyRefusal | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_headers = True
        self._is_in_body = False
        self._num_header_bytes = 0
        self._num_trailer_bytes = 0
        self._num_framing_bytes = 0  # received after the headers, less what was body
        self._num_body_bytes = 0
        self._num_lingering_bytes = 0
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._socket: socket.socket | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Starts waiting for the first headers."""
        super().connection_made(transport)
        self._start_timer(self.headers_timeout_s)
        self._socket = transport.get_extra_info("socket")
        _limit_sending(self._socket, self.send_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses bytes; a request beyond a limit ends the connection."""
        if self._is_refused:
            return
        if self._is_in_headers:
            self._num_header_bytes += len(data)
        elif self._is_in_body:
            self._num_framing_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._num_header_bytes > self.max_header_bytes:
            self._refuse(headers_too_large())
        elif self._is_in_body:
            self._check_body(len(data))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._num_header_bytes = max(self._num_header_bytes, 1)  # a pipelined request begins at once
        if self._timer is None:
            self._start_timer(self.headers_timeout_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collects a header; what comes after the headers is a trailer, which is counted and dropped."""
        if self._is_in_headers:
            if value[-1:] in _BLANKS:  # around a value they are no part of it
                value = value.rstrip(b" \t")
            super().on_header(name, value)
            return
        self._num_trailer_bytes += len(name) + len(value) + 4
        if self._num_trailer_bytes > MAX_TRAILER_BYTES:
            self._refuse_while_parsing(headers_too_large())

    def on_headers_complete(self) -> None:
        """Checks the headers before the application runs."""
        self._is_in_headers = False
        self._num_header_bytes = self._num_trailer_bytes = 0
        self._num_framing_bytes = self._num_body_bytes = self._num_lingering_bytes = 0
        if len(self.pipeline) >= MAX_NUM_PIPELINED:
            self._refuse_while_parsing(invalid_http())
        is_old = self.parser.get_http_version() == "1.0"
        refusal = self._refusal_of_headers(is_old)
        if refusal is not None:
            self._refuse_while_parsing(refusal)
        if is_old:
            self.expect_100_continue = False  # such a client would take the interim answer for the answer
        self._start_timer(self.request_timeout_s)
        received_s = self.scope["state"][RECEIVED_S] = time.monotonic() - waited_s(self._socket)
        refusal = None
        # A client that does not read its answers might make this one wait.
        can_answer = not is_old and self.parser.get_method() == b"POST" and not self.transport.get_write_buffer_size()
        if self.early_refusal is not None and can_answer:
            path = unquote(self.url.partition(b"?")[0].decode("ascii", "replace"))
            refusal = self.early_refusal(path, self.headers, received_s)
        if refusal is None:
            super().on_headers_complete()
        else:
            self._answer_at_once(refusal)
        if is_old:
            _end_with_connection(self.cycle)
        else:
            self.scope["state"][PART_WRITER] = _ChunkWriter(self.flow, self.cycle)
        self._is_in_body = True

    def _answer_at_once(self, answer: ErrorAnswer) -> None:
        """Answers in this turn of the loop, as an application would that waits for nothing."""
        app, loop = self.app, self.loop
        eager = EagerLoop(loop)
        self.app, self.loop = answering(answer), cast("asyncio.AbstractEventLoop", eager)
        try:
            super().on_headers_complete()
        finally:
            self.app, self.loop = app, loop
            self.tasks.discard(cast("asyncio.Task[None]", eager))

    def _refusal_of_headers(self, is_old: bool) -> ErrorAnswer | None:
        num_bytes, num_hosts, is_expectation_known, is_coding_known = len(self.url), 0, True, True
        for name, value in self.headers:
            num_bytes += len(name) + len(value) + 4
            if name == b"host":
                num_hosts += 1
            elif name == b"expect":
                is_expectation_known = is_old or value.lower() == b"100-continue"
            elif name == b"transfer-encoding":
                is_coding_known = value.lower() == b"chunked"
        if num_bytes > self.max_header_bytes or len(self.headers) > self.max_num_headers:
            return headers_too_large()
        if num_hosts != 1 and not (is_old and num_hosts == 0):
            return invalid_host()
        if not is_expectation_known:
            return expectation_failed()
        return None if is_coding_known else invalid_http()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_framing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Closes the connection soon where the answer ends before its request."""
        super().on_response_complete()
        if self._is_in_body and self.cycle.response_complete:
            self._start_timer(self.linger_s)

    def handle_websocket_upgrade(self) -> None:
        """Hands the connection over, unless an earlier request is still being answered on it."""
        self._stop_timer()
        if self._can_answer():
            self._stop_send_timer()
            super().handle_websocket_upgrade()
        else:
            self._close()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP, unless an answer was sent already."""
        self._refuse(invalid_http())

    def _check_body(self, num_bytes: int) -> None:
        """Ends a request whose framing is too large, or that goes on long after its answer."""
        if self.cycle.response_complete:
            self._num_lingering_bytes += num_bytes
            if self._num_lingering_bytes > LINGER_BYTES:
                self._close()
        if self._num_framing_bytes > MAX_FRAMING_BYTES + MAX_FRAMING_PER_BODY_BYTE * self._num_body_bytes:
            self._refuse(headers_too_large())

    def _start_timer(self, timeout_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self.pipeline:  # reading is paused: the request cannot arrive before the answers to earlier ones are sent
            self._start_timer(self.request_timeout_s)
        elif self._num_header_bytes or (self._is_in_body and not self.cycle.response_started):
            self._refuse(request_timeout())
        else:
            self._close()

    def _close(self) -> None:
        self._is_refused = True
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse_while_parsing(self, answer: ErrorAnswer) -> None:
        """Refuses the request and leaves the parser."""
        self._refuse(answer)
        raise httptools.HttpParserInvalidMethodError("a request beyond the limits")

    def _refuse(self, answer: ErrorAnswer) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_timer()
        if not self._can_answer():
            if self._is_in_body:
                self.transport.close()
            else:
                self.cycle.keep_alive = False  # the requests before it are answered, then the connection ends
            return
        if self._is_in_body:
            self.cycle.disconnected = True  # the application writes nothing more
            self.cycle.message_event.set()
        self._write(answer)
        # An immediate close would reset the connection before the client has read the answer.
        if self.transport.can_write_eof():  # not under TLS
            self.transport.write_eof()
        self.loop.call_later(self.refusal_linger_s, self.transport.close)

    def _can_answer(self) -> bool:
        """Whether the next bytes that are sent would be taken for the answer to the request that arrives."""
        if self.pipeline:
            return False
        if self._is_in_body:
            return not self.cycle.response_started
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, unlike uvicorn declares it
        return cycle is None or cycle.response_complete

    def _write(self, answer: ErrorAnswer) -> None:
        content = answer.encoded()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            "x-request-id": uuid.uuid4().hex,
            **answer.headers,
        }
        lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        self.transport.write(b"".join([STATUS_LINE[answer.status], *lines, b"\r\n", content]))


@dataclass(slots=True)
class _ChunkWriter:
    """Writes chunks of an answer whose headers are sent: a `PartWriter`."""

    flow: Flow
    _cycle: RequestResponseCycle

    def write(self, data: bytes) -> None:
        """Writes one chunk, unless the client has gone."""
        if not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """Lets the end of the connection end an answer without a length, since HTTP/1.0 has no chunks."""
    send, has_length = cycle.send, True

    async def send_without_chunks(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_without_chunks  # type: ignore[method-assign]


def _limit_sending(connection: socket.socket | None, timeout_s: float) -> None:
    """Lets Linux end a TCP connection whose last bytes are never taken, also after the answer has ended."""
    if connection is not None and connection.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):  # the client has gone already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1e3))


def limited_protocol(http: HTTPConfig, early_refusal: EarlyRefusal | None = None) -> type[LimitedProtocol]:
    """A subclass of the protocol with the limits of the configuration."""
    limits = {
        "early_refusal": None if early_refusal is None else staticmethod(early_refusal),
        "max_header_bytes": http.max_header_bytes,
        "max_num_headers": http.max_num_headers,
        "request_timeout_s": http.receive_timeout_s,
        "send_timeout_s": http.send_timeout_s,
    }
    return type("LimitedProtocol", (LimitedProtocol,), limits)
