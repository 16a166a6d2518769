"""Comments in streams of events while there is nothing else to send."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

from starlette.types import Send

from llmstack_server.web.sse import Events
from llmstack_server.web.streams import close

INTERVAL_S = 5.0
"""Proxies and clients close connections on which nothing comes for about a minute; some after ten seconds."""
COMMENT = b": keep-alive\n\n"

Value = TypeVar("Value")
RawHeaders = Sequence[tuple[bytes, bytes]]


class Flow(Protocol):
    """The flow of what is sent on a connection.

    Attributes:
        write_paused: Whether sending waits until the client has read.
    """

    write_paused: bool


class PartWriter(Protocol):
    """Writes parts of an answer to its connection. A `send` that passes parts on has one as `part_writer`.

    A message of ASGI takes a dictionary and a coroutine in each layer, which costs more than the part.
    """

    flow: Flow

    def write(self, data: bytes) -> None:
        """Writes a part after the headers that is not the last one. The answer has no length."""
        ...


PART_WRITER = "part_writer"
"""The name of a connection's own `PartWriter`, in the state of a request's scope."""


class EventSender:
    """Sends the events of a stream, and a comment whenever none was sent for a while.

    The headers go with whatever is first: until then an error can have its own status.

    Attributes:
        can_push: Whether `push` ever takes an event.
        has_started: Whether the headers were sent.
        waited_s: How long events have waited until the connection took them, its reader's part.
    """

    def __init__(self, send: Send, headers: RawHeaders, *, comment: bytes = COMMENT) -> None:
        """`comment`: Empty for a stream whose form has none, so that nothing is sent between its events."""
        self.has_started = False
        self.waited_s = 0.0
        self._send = send
        self._headers = headers
        self._is_sending = False
        # `functools.wraps` copies the attribute to a function that looks at messages.
        is_whole = not hasattr(send, "__wrapped__")
        self._writer: PartWriter | None = getattr(send, PART_WRITER, None) if is_whole else None
        self.can_push = self._writer is not None
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._comment_bytes = comment
        self._timer = self._loop.call_later(INTERVAL_S, self._on_timer) if comment else None
        self._comment: asyncio.Task[None] | None = None

    def push(self, encode: Callable[[Value], Events], value: Value) -> bool:
        """Encodes and sends events at once, neither the first nor the last one; False where that would wait."""
        writer = self._writer
        if writer is None or self._is_sending or self._comment is not None or writer.flow.write_paused:
            return False
        events = encode(value)
        if events:
            writer.write(events if isinstance(events, bytes) else b"".join(events))
            self._last_s = self._loop.time()
        return True

    def pusher(self, id_line: bytes) -> Callable[[int, bytes], bool]:
        """A function that sends encoded events, each with its number behind `id_line` before it."""
        writer, time_s = self._writer, self._loop.time

        def push(number: int, event: bytes) -> bool:
            if writer is None or self._is_sending or self._comment is not None or writer.flow.write_paused:
                return False
            writer.write(b"%b%d\n%b" % (id_line, number, event))
            self._last_s = time_s()
            return True

        return push

    async def event(self, events: Events) -> None:
        """Sends events that are not the last ones; not while others are being sent."""
        data = events if isinstance(events, bytes) else b"".join(events)
        if self._comment is not None:
            await self._finish_comment()
        self._is_sending = True
        began_s = self._loop.time()
        try:
            if not self.has_started:
                await self._start()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._is_sending = False
            self._last_s = self._loop.time()
            self.waited_s += self._last_s - began_s

    async def end(self, data: bytes) -> None:
        """Sends the last event."""
        await self.stop()
        began_s = self._loop.time()
        try:
            if not self.has_started:
                await self._start()
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
        finally:
            self.waited_s += self._loop.time() - began_s

    async def fail(self, event: bytes) -> None:
        """Sends the event of an error as the last one."""
        await self.end(event)

    def forget(self) -> None:
        """Does nothing, under the name that `Recorder` has: nothing is remembered here."""

    async def stop(self) -> None:
        """Sends no further comment, and gives up one that waits for its reader. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
            await self._finish_comment()

    async def _start(self) -> None:
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(self._headers)})

    async def _finish_comment(self) -> None:
        if self._comment is not None:
            await asyncio.wait([self._comment])
            self._comment = None

    def _on_timer(self) -> None:
        idle_s = self._loop.time() - self._last_s
        # A reader that does not read needs no comment.
        if idle_s >= INTERVAL_S and not self._is_sending and (self._comment is None or self._comment.done()):
            self._comment = self._loop.create_task(self._send_comment())
            idle_s = 0.0
        self._timer = self._loop.call_later(max(INTERVAL_S - idle_s, INTERVAL_S / 10), self._on_timer)

    async def _send_comment(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone, which the request notices by itself
            if not self.has_started:
                await self._start()
            await self._send({"type": "http.response.body", "body": self._comment_bytes, "more_body": True})
            self._last_s = self._loop.time()


async def with_comments(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events of a stream, and a comment whenever none has come for a while."""
    pending: asyncio.Future[bytes] = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait([pending], timeout=INTERVAL_S)
            if not done:
                yield COMMENT
                continue
            try:
                event = pending.result()
            except StopAsyncIteration:
                return
            yield event
            pending = asyncio.ensure_future(anext(events))
    finally:
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await close(events)
