"""WebSocket protocol of uvicorn with limits on messages and slow readers."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto import events

from llmstack_server.options.config import HTTPConfig
from llmstack_server.serving.send_timer import TimedSending
from llmstack_server.web.websocket import TOO_LARGE

_DROPPED_MESSAGES = 4
"""A message that is so many times as long as allowed ends the connection; a shorter one is dropped and named."""


class LimitedWebSocket(TimedSending, WSProtocol):
    """One connection whose messages have at most `max_message_bytes`.

    A longer one is read to its end without being kept, so that an event can name it.
    """

    max_message_bytes = 4 << 20

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_bytes = 0
        self._parts: list[str | bytes] = []

    def handle_message(self, event: events.TextMessage | events.BytesMessage) -> None:
        """Collects a message. Reading goes on once the application has asked for the next one."""
        data = event.data
        self._num_bytes += len(data.encode()) if isinstance(data, str) else len(data)
        if self._num_bytes > self.max_message_bytes:
            self._parts.clear()
            if self._num_bytes > _DROPPED_MESSAGES * self.max_message_bytes:
                self._end_too_long()
                return
        else:
            self._parts.append(data if isinstance(data, str) else bytes(data))
        if event.message_finished:
            is_too_large = self._num_bytes > self.max_message_bytes
            message: dict[str, object] = {"type": "websocket.receive"}
            if is_too_large:
                message[TOO_LARGE] = True
            elif isinstance(data, str):
                message["text"] = "".join(part for part in self._parts if isinstance(part, str))
            else:
                message["bytes"] = b"".join(part for part in self._parts if isinstance(part, bytes))
            self._parts, self._num_bytes = [], 0
            self.queue.put_nowait(message)  # type: ignore[arg-type]  # it has a key of ours
            if not self.read_paused:
                self.read_paused = True
                self.transport.pause_reading()

    def _end_too_long(self) -> None:
        reason = f"A message may have {self.max_message_bytes} bytes."
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": 1009, "reason": reason})
        if not self.transport.is_closing():
            self.transport.write(self.conn.send(events.CloseConnection(code=1009, reason=reason)))
            self.transport.close()


def limited_websocket(http: HTTPConfig) -> type[asyncio.Protocol]:
    """A subclass of the protocol with the limits of the configuration."""
    limits = {"max_message_bytes": http.max_body_bytes, "send_timeout_s": http.send_timeout_s}
    return type("LimitedWebSocket", (LimitedWebSocket,), limits)
