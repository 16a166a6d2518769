"""Takes down what a route sends, for any number of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Message

from llmstack_server.state.queue_monitor import current_request
from llmstack_server.state.stream_record import Head, StreamRecord
from llmstack_server.state.stream_table import StreamTable
from llmstack_server.web.keep_alive import KeptSend, RawHeaders, Value

_END_OF_EVENT = b"\n\n"
_ERROR_EVENTS = (b'data: {"error":', b"event: error\n")
# Of a response, whose first events come before its first token.
_FAILED_EVENT = b"event: response.failed\n"
_COMMENT = b":"
_UNUSUAL_EVENTS = (*_ERROR_EVENTS, _FAILED_EVENT, _COMMENT)


class Recorder(KeptSend):
    """The `send` of a request whose answer is kept. An answer that fails before its first token is not kept.

    A route that streams may give it the events themselves, with the sender of `event_sender`.
    """

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

    @property
    def left(self) -> asyncio.Future[None]:
        """Done once no reader has the answer or can come: the end of the client."""
        return self._record.left

    def __call__(self, message: Message) -> Awaitable[None]:
        """Records one ASGI message."""
        return self.send(message)

    def event_sender(self, headers: RawHeaders) -> RecordedEvents:
        """Takes the place of `EventSender`, in a stream with these headers."""
        return RecordedEvents(self, self._record, headers)

    async def send(self, message: Message) -> None:
        """Records one ASGI message."""
        if message["type"] == "http.response.start":
            self._begin(message)
            return
        body = bytes(message.get("body", b""))
        if self._is_stream:
            await self.append_events(body)
        elif body:
            await self._record.append(body)
        if not message.get("more_body", False):
            self.finish()

    async def leave(self) -> bool:
        """Leaves the answer to the next server, if this one ends."""
        self._has_left = self._has_left or (self._is_left is not None and await self._is_left())
        return self._has_left

    def fail(self, fields: Mapping[str, object]) -> None:
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

    async def append_events(self, body: bytes) -> None:
        """Adds what a stream sends to the record, event by event."""
        *events, self._rest = (self._rest + body).split(_END_OF_EVENT)
        for event in events:
            if event.startswith(_COMMENT):
                continue  # each connection has comments of its own
            if event.startswith(_ERROR_EVENTS) and await self.leave():
                return
            is_first_error = not self._record.num_parts and event.startswith(_ERROR_EVENTS)
            if is_first_error or event.startswith(_FAILED_EVENT):
                self._table.remove(self._record)
            await self._append_event(event + _END_OF_EVENT)

    async def _append_event(self, event: bytes) -> None:
        await self._record.append(event)


class RecordedEvents:
    """Sends the events of a stream to its record. Connections have comments of their own, so there are none here.

    Attributes:
        can_push: Always.
        has_started: As of `EventSender`.
        waited_s: 0: its readers wait for their connections.
    """

    def __init__(self, recorder: Recorder, record: StreamRecord, headers: RawHeaders) -> None:
        self.can_push = True
        self.has_started = False
        self.waited_s = 0.0
        self._recorder = recorder
        self._record = record
        self._headers = headers

    def push(self, encode: Callable[[Value], bytes], value: Value) -> bool:
        """Encodes and adds an event or several at once, neither the first nor the last one.

        False where it cannot be read again, and so waits for its reader.
        """
        record = self._record
        if not self.has_started or not record.is_resumable:
            return False
        data = encode(value)
        # The usual case is one event of one line, which one character shows.
        if data.find(b"\n") == len(data) - len(_END_OF_EVENT) or _is_one(data):
            record.put(data)
        else:
            for event in data.split(_END_OF_EVENT)[:-1]:
                record.put(event + _END_OF_EVENT)
        return True

    async def event(self, data: bytes) -> None:
        """Adds an event that is not the last one."""
        await self._add(data)

    async def end(self, data: bytes) -> None:
        """Adds the last event. Its reader sends it together with the end of the answer."""
        if self.has_started and self._record.is_resumable and _is_usual(data):
            self._record.put(data, is_last=True)
        else:
            await self._add(data)
        self._recorder.finish()

    async def stop(self) -> None:
        """As of `EventSender`; there is nothing to stop."""

    async def _add(self, data: bytes) -> None:
        if not self.has_started:
            self.has_started = True
            await self._recorder.send({"type": "http.response.start", "status": 200, "headers": list(self._headers)})
        await self._recorder.append_events(data)


def _is_one(data: bytes) -> bool:
    return data.find(_END_OF_EVENT) == len(data) - len(_END_OF_EVENT)


def _is_usual(data: bytes) -> bool:
    """Whether it is one whole event, neither a comment nor an error."""
    return _is_one(data) and not data.startswith(_UNUSUAL_EVENTS)
