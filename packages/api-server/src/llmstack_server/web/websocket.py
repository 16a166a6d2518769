"""The opening of a WebSocket as a request of HTTP, and its connection."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from llmstack_server.web.body import ClientDisconnected
from llmstack_server.web.sse import encode_json

WEBSOCKET: Final = "llmstack.websocket"
"""Key of a scope's state: the `WebSocket` of a request that opens one."""
SESSION_ID: Final = "llmstack.session_id"
"""Key of a request's state: the id of a session whose first event was sent before its model was known."""
MAX_KEPT_BYTES: Final = 4 << 20
"""Of messages that come while a connection waits; then no more is read, and its end is noticed later."""
TOO_LARGE: Final = "llmstack.too_large"
"""Key of a message whose text was longer than allowed, and was dropped."""
_SUBPROTOCOL: Final = "realtime"
_KEY_SUBPROTOCOL: Final = "openai-insecure-api-key."
"""Scripts of a browser cannot set headers: OpenAI's put the key behind this, as the name of a subprotocol."""
_SWITCHING: Final = 101


def can_open_websockets() -> bool:
    """Whether the library that reads them is installed."""
    return importlib.util.find_spec("wsproto") is not None


class WebSocketClosed(ClientDisconnected):
    """The client has closed the connection, or is gone."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message of the client; `text` is None where it was longer than allowed."""

    text: str | None


class WebSocket:
    """One connection: a request opens it, then both sides send messages of text.

    Attributes:
        is_open: Whether it was opened; nothing of HTTP can be sent any more.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._subprotocols: list[str] = list(scope.get("subprotocols") or ())
        self._is_refused = self.is_open = False
        self._kept = deque[Received]()

    async def receive(self) -> Received:
        """The next message.

        Raises:
            WebSocketClosed: There will be none.
        """
        return self._kept.popleft() if self._kept else await self._next()

    def read_again(self, message: Received) -> None:
        """Has a message read once more, before all others."""
        self._kept.appendleft(message)

    async def _next(self) -> Received:
        message = await self._receive()
        while message["type"] == "websocket.connect":  # the request that opened it
            message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketClosed
        if message.get(TOO_LARGE):
            return Received(None)
        text, data = message.get("text"), message.get("bytes")
        return Received(text if text is not None else (data or b"").decode("utf-8", "replace"))

    async def wait_until_closed(self) -> None:
        """Returns when the client is gone; keeps what comes on an open connection, up to `MAX_KEPT_BYTES`."""
        num_bytes = 0
        with contextlib.suppress(WebSocketClosed):
            while num_bytes <= MAX_KEPT_BYTES:
                message = await self._next()
                self._kept.append(message)
                num_bytes += len(message.text or "")
            await asyncio.get_running_loop().create_future()

    async def send(self, event: Mapping[str, object], timeout_s: float | None = None) -> None:
        """Sends an object as JSON, once the client has read enough of what was sent before.

        Raises:
            WebSocketClosed: The client is gone, or has not read for `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._send({"type": "websocket.send", "text": encode_json(event)})
        except OSError as error:  # a TimeoutError is one, and what servers raise where the client is gone
            raise WebSocketClosed from error

    async def close(self, code: int, reason: str = "") -> None:
        """Closes it with a code of RFC 6455, unless the client is gone."""
        with contextlib.suppress(OSError):
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def answer(self, message: Message) -> None:
        """Sends a message of an answer of HTTP: status 101 opens the connection, all others refuse it."""
        if self.is_open:
            return  # a session that was opened before its model was known
        if message["type"] == "http.response.start" and message["status"] == _SWITCHING:
            self.is_open = True
            chosen = _SUBPROTOCOL if _SUBPROTOCOL in self._subprotocols else None
            headers = [(name, value) for name, value in message["headers"] if name.lower() != b"content-length"]
            await self._send({"type": "websocket.accept", "subprotocol": chosen, "headers": headers})
        elif message["type"] == "http.response.start":
            self._is_refused = True
            await self._send({**message, "type": "websocket.http.response.start"})
        elif self._is_refused:
            await self._send({"body": b"", **message, "type": "websocket.http.response.body"})


def opening_request(scope: Scope, receive: Receive, send: Send) -> tuple[Scope, Receive, Send]:
    """The request that opens a WebSocket, for layers that know HTTP: its state has the connection.

    A key that stands among the subprotocols is one of the header `authorization`, where there is no such header.
    """
    socket = WebSocket(scope, receive, send)
    request = {**scope, "type": "http", "method": "GET", "scheme": _scheme(scope), "state": dict(scope["state"])}
    request["headers"] = _with_key(scope["headers"], scope.get("subprotocols") or ())
    request["state"][WEBSOCKET] = socket
    return request, _no_body(), socket.answer


def websocket_of(scope: Scope) -> WebSocket | None:
    """The connection that a request opens; None for any other request."""
    socket = scope["state"].get(WEBSOCKET)
    return socket if isinstance(socket, WebSocket) else None


def _scheme(scope: Scope) -> str:
    return {"wss": "https"}.get(scope.get("scheme", ""), "http")


def _with_key(headers: Iterable[tuple[bytes, bytes]], subprotocols: Iterable[str]) -> list[tuple[bytes, bytes]]:
    kept = list(headers)
    if "authorization" not in Headers(raw=kept):
        for one in subprotocols:
            if one.startswith(_KEY_SUBPROTOCOL):
                kept.append((b"authorization", b"Bearer " + one.removeprefix(_KEY_SUBPROTOCOL).encode("latin-1")))
                break
    return [(name, value) for name, value in kept if name != b"sec-websocket-protocol"]  # keys are in no log


def _no_body() -> Receive:
    """Receives an empty body, then nothing: messages of the connection are received from the `WebSocket`."""
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.get_running_loop().create_future()
        is_read = True
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive
