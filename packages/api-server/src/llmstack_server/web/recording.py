"""Takes down what a route sends, for any number of connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.types import Message

from llmstack_server.state.queue_monitor import current_request
from llmstack_server.state.stream_record import Head, StreamRecord
from llmstack_server.state.stream_table import StreamTable

_END_OF_EVENT = b"\n\n"
_ERROR_EVENTS = (b'data: {"error":', b"event: error\n")


class Recorder:
    """The `send` of a request whose answer is kept. An answer that fails before its first token is not kept."""

    def __init__(
        self, record: StreamRecord, table: StreamTable, is_left: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        """`is_left`: Whether an error is that of a server that ends: then the next server goes on before it."""
        self._record = record
        self._table = table
        self._is_left = is_left
        self._has_left = False
        self._has_begun = False
        self._is_stream = False
        self._rest = b""

    async def send(self, message: Message) -> None:
        """Records one ASGI message."""
        if message["type"] == "http.response.start":
            self._begin(message)
            return
        body = bytes(message.get("body", b""))
        if self._is_stream:
            await self._append_events(body)
        elif body:
            await self._record.append(body)
        if not message.get("more_body", False):
            self.finish()

    async def leave(self) -> bool:
        """Leaves the answer to the next server, if this one ends."""
        self._has_left = self._has_left or (self._is_left is not None and await self._is_left())
        return self._has_left

    def fail(self, fields: Mapping[str, Any]) -> None:
        """Ends the answer with an error; one that has begun ends where it is."""
        if not self._has_begun:
            self._table.remove(self._record)
            self._record.fail(fields)

    def finish(self) -> None:
        """The answer is complete, unless the next server completes it. Idempotent."""
        if not self._has_left:
            self._record.finish()

    def _begin(self, message: Message) -> None:
        self._has_begun = True
        headers = tuple((bytes(name), bytes(value)) for name, value in message["headers"])
        self._is_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
        if message["status"] >= 400:
            self._table.remove(self._record)
        request = current_request.get()
        if request is not None:
            request.is_recorded = True  # its readers wait for their clients, and it does not
        request_id = "" if request is None else request.request_id
        self._record.begin(Head(message["status"], headers, self._is_stream, request_id))

    async def _append_events(self, body: bytes) -> None:
        *events, self._rest = (self._rest + body).split(_END_OF_EVENT)
        for event in events:
            if event.startswith(b":"):
                continue  # each connection has comments of its own
            if event.startswith(_ERROR_EVENTS) and await self.leave():
                return
            if not self._record.num_parts and event.startswith(_ERROR_EVENTS):
                self._table.remove(self._record)
            await self._append_event(event + _END_OF_EVENT)

    async def _append_event(self, event: bytes) -> None:
        await self._record.append(event)
