"""Takes down what a route sends, for any number of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Message

from llmstack_server.state.queue_monitor import current_request
from llmstack_server.state.stream_record import Head, StreamRecord
from llmstack_server.state.stream_table import StreamTable
from llmstack_server.web.keep_alive import RawHeaders, Value
from llmstack_server.web.sse import Events

RECORDER = "recorder"
"""The name of the `Recorder` of a request, in the state of its scope."""


class Recorder:
    """The `send` of a request whose answer is kept, and the sender of its events: see `EventSender`.

    An answer that fails before its first token is not kept. There are no comments: connections have their own.

    Attributes:
        can_push: Always.
        has_started: As of `EventSender`.
        waited_s: 0: its readers wait for their connections.
    """

    can_push = True
    waited_s = 0.0

    def __init__(
        self, record: StreamRecord, table: StreamTable, is_left: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        """`is_left`: Whether an error is that of a server that ends: then the next server goes on before it."""
        self.has_started = False
        self._record = record
        self._table = table
        self._is_left = is_left
        self._has_left = False
        self._headers: RawHeaders = ()

    @property
    def left(self) -> asyncio.Future[None]:
        """Done once no reader has the answer or can come: the end of the client."""
        return self._record.left

    async def __call__(self, message: Message) -> None:
        """Records one ASGI message of an answer that is no stream."""
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"], is_stream=False)
            return
        if body := bytes(message.get("body", b"")):
            await self._record.append(body)
        if not message.get("more_body", False):
            self.finish()

    def begin_stream(self, headers: RawHeaders) -> None:
        """Events follow, and these headers with the first of them."""
        self._headers = headers

    def push(self, encode: Callable[[Value], Events], value: Value) -> bool:
        """Encodes and adds an event or several at once, neither the first nor the last one.

        False where it cannot be read again, and so waits for its reader.
        """
        record = self._record
        if not self.has_started or not record.is_resumable:
            return False
        events = encode(value)
        if not isinstance(events, bytes):
            for event in events:
                record.put(event)
        elif events:
            record.put(events)
        return True

    async def event(self, events: Events) -> None:
        """Adds an event or several that are not the last ones."""
        if not self.has_started:
            self._begin(200, self._headers, is_stream=True)
        for event in (events,) if isinstance(events, bytes) else events:
            await self._record.append(event)

    async def end(self, event: bytes) -> None:
        """Adds the last event, if there is one. Its reader sends it together with the end of the answer."""
        if event and self.has_started and self._record.is_resumable:
            self._record.put(event, is_last=True)
        elif event:
            await self.event(event)
        self.finish()

    async def fail(self, event: bytes) -> None:
        """Adds the event of an error as the last one. What fails before its first token is not remembered."""
        if not await self.leave():
            if not self._record.num_parts:
                self.forget()
            await self.end(event)

    async def stop(self) -> None:
        """Does nothing, under the name that `EventSender` has: there is nothing to stop."""

    def forget(self) -> None:
        """The answer is not remembered: its reader alone gets all of it."""
        self._table.remove(self._record)

    async def leave(self) -> bool:
        """Leaves the answer to the next server, if this one ends."""
        self._has_left = self._has_left or (self._is_left is not None and await self._is_left())
        return self._has_left

    def fail_unstarted(self, fields: Mapping[str, object]) -> None:
        """Ends the answer with an error; one that has begun ends where it is."""
        if not self.has_started:
            self.forget()
            self._record.fail(fields)

    def finish(self) -> None:
        """The answer is complete, unless the next server completes it. Idempotent."""
        if not self._has_left:
            self._record.finish()

    def _begin(self, status: int, headers: RawHeaders, *, is_stream: bool) -> None:
        self.has_started = True
        if status >= 400:
            self.forget()
        request = current_request.get()
        if request is not None:
            request.is_recorded = True  # its readers wait for their clients, and it does not
        pairs = tuple((bytes(name), bytes(value)) for name, value in headers)
        self._record.begin(Head(status, pairs, is_stream, "" if request is None else request.request_id))
