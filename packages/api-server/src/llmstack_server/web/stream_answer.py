"""Answers that are read from a record, and sent to one connection."""

from __future__ import annotations

from typing import NoReturn

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmstack_server.state.remote_streams import Reader
from llmstack_server.state.server_state import ServerState
from llmstack_server.state.shared_streams import KeyReusedError
from llmstack_server.state.stream_record import (
    Batch,
    FailedError,
    ReplacedError,
    StreamAwayError,
    StreamReader,
    UnknownStreamError,
)
from llmstack_server.web.answers import run_here_while_connected
from llmstack_server.web.body import ClientDisconnected
from llmstack_server.web.clients import current_client
from llmstack_server.web.error_forms import ERROR_FORM, ErrorForm
from llmstack_server.web.errors import (
    ErrorAnswer,
    HTTPError,
    answer_to,
    idempotency_key_reused,
    stream_away,
    stream_not_found,
    stream_reader_replaced,
)
from llmstack_server.web.keep_alive import COMMENT, EventSender

RESUMABLE_HEADER = "x-llmstack-resumable"
STREAM_ID_HEADER = "x-llmstack-stream-id"
# Headers that describe the answer itself, and not the request that generated it.
_LASTING_HEADERS = frozenset({b"content-type", b"content-length", b"cache-control", b"x-accel-buffering"})


class StreamAnswer(Response):
    """The answer of one reader of a resumable stream, for a route."""

    def __init__(self, state: ServerState, reader: Reader) -> None:
        super().__init__()
        self._connection = StreamConnection(state, reader)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; its errors before the first byte are raised."""
        await self._connection.answer(scope, receive, send)


class StreamConnection:
    """The connection of one reader of a resumable stream. Its events have ids."""

    def __init__(self, state: ServerState, reader: Reader, *, is_first: bool = False) -> None:
        """`is_first`: Whether this is the request that generates the answer."""
        self._state = state
        self._reader = reader
        self._is_first = is_first
        self._sender: EventSender | None = None
        self._id_line = b"id: %b." % reader.stream_id.encode()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; its errors before the first byte are raised."""
        try:
            with self._state.in_flight.track_reader() as cut:
                await run_here_while_connected(self._send_all(send), receive, cut)
        except ClientDisconnected:
            raise
        except Exception as error:  # any error becomes the last event of a started stream
            request_id = scope["state"]["request_id"]
            answer = _known_answer(error) or answer_to(error, request_id)
            if self._sender is None or not self._sender.has_started:
                raise HTTPError(answer) from error
            form: ErrorForm = scope["state"][ERROR_FORM]
            await self._sender.end(form.last_event(answer, request_id, self._reader.position))
        finally:
            await self._reader.aclose()

    async def _send_all(self, send: Send) -> None:
        batch = await self._reader.read()
        if batch.head.is_stream:
            await self._send_events(batch, send)
        else:
            await self._send_whole(batch, send)

    async def _send_whole(self, batch: Batch, send: Send) -> None:
        await send({"type": "http.response.start", "status": batch.head.status, "headers": self._headers_for(batch)})
        while True:
            body = b"".join(batch.parts)
            await send({"type": "http.response.body", "body": body, "more_body": not batch.is_last})
            if batch.is_last:
                return
            batch = await self._reader.read()

    async def _send_events(self, batch: Batch, send: Send) -> None:
        sender = self._sender = EventSender(send, self._headers_for(batch))
        try:
            try:
                while not batch.is_last:
                    events = self._events(batch)
                    if events or batch.first > 1:  # the sender has comments for who waits for the first event
                        await sender.event(events or COMMENT)
                    if sender.has_started and isinstance(self._reader, StreamReader):
                        self._reader.follow(sender.pusher(self._id_line))
                    batch = await self._reader.read()
            finally:
                await sender.stop()
            await sender.end(self._events(batch))
        finally:
            if batch.head.request_id:
                tenant = current_client.get().tenant
                self._state.slow_readers.note(batch.head.request_id, tenant, sender.waited_s)

    def _events(self, batch: Batch) -> bytes:
        parts = enumerate(batch.parts, start=batch.first)
        return b"".join([b"%b%d\n%b" % (self._id_line, number, part) for number, part in parts])

    def _headers_for(self, batch: Batch) -> list[tuple[bytes, bytes]]:
        headers = [pair for pair in batch.head.headers if self._is_first or pair[0].lower() in _LASTING_HEADERS]
        if batch.is_resumable:
            headers.append((STREAM_ID_HEADER.encode(), self._reader.stream_id.encode()))
        return [*headers, (RESUMABLE_HEADER.encode(), b"true" if batch.is_resumable else b"false")]


def raise_as_http(error: Exception) -> NoReturn:
    """Raises an error of streams as HTTPError, and any other one as it is."""
    answer = _known_answer(error)
    if answer is None:
        raise error
    raise HTTPError(answer) from error


def _known_answer(error: Exception) -> ErrorAnswer | None:
    if isinstance(error, ReplacedError):
        return stream_reader_replaced()
    if isinstance(error, UnknownStreamError):
        return stream_not_found()
    if isinstance(error, StreamAwayError):
        return stream_away()
    if isinstance(error, KeyReusedError):
        return idempotency_key_reused()
    return ErrorAnswer(**error.fields) if isinstance(error, FailedError) else None
