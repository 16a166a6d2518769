"""A client of WebSockets without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmstack_server.web.websocket import TOO_LARGE

_WAIT_S = 30.0


class WebSocketClient:
    """One connection to an ASGI application; use it as a context manager.

    Attributes:
        status: Of the answer: 101 once the connection is open.
        headers: Of the answer.
        body: Of an answer that refuses the connection.
        subprotocol: What the server has chosen.
        close_code: With which the server has closed it; None while it is open.
    """

    def __init__(
        self, app: Any, path: str, headers: Mapping[str, str] | None = None, subprotocols: Sequence[str] = ()
    ) -> None:
        path, _, query = path.partition("?")
        given = {"host": "localhost", **(headers or {})}
        self._app = app
        self._scope = {
            "type": "websocket", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "ws", "path": path,
            "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "client": ("test", 1),
            "server": ("test", 80), "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
            "subprotocols": list(subprotocols), "state": {}, "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        self._to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._from_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._has_answer = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.can_read = asyncio.Event()
        self.can_read.set()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.subprotocol: str | None = None
        self.close_code: int | None = None

    async def __aenter__(self) -> WebSocketClient:
        self._to_server.put_nowait({"type": "websocket.connect"})
        self._task = asyncio.create_task(self._app(self._scope, self._to_server.get, self._take))
        answered = asyncio.create_task(self._has_answer.wait())
        await asyncio.wait({answered, self._task}, timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        answered.cancel()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._to_server.put_nowait({"type": "websocket.disconnect", "code": 1000})
        self.can_read.set()
        if self._task is not None:
            await asyncio.wait_for(self._task, _WAIT_S)

    def send(self, event: Any) -> None:
        """Sends an object as JSON, or a text as it is."""
        text = event if isinstance(event, str) else json.dumps(event)
        self._to_server.put_nowait({"type": "websocket.receive", "text": text})

    def send_too_large(self) -> None:
        """What a protocol passes on in place of a message that was too long."""
        self._to_server.put_nowait({"type": "websocket.receive", TOO_LARGE: True})

    @property
    def num_unread(self) -> int:
        """Messages that the server has not taken yet."""
        return self._to_server.qsize()

    async def next(self) -> dict[str, Any]:
        """The next event; an empty one where the server has closed the connection."""
        message = await asyncio.wait_for(self._from_server.get(), _WAIT_S)
        found: dict[str, Any] = json.loads(message["text"]) if "text" in message else {}
        return found

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """The events up to the first one whose type ends so."""
        events = [await self.next()]
        while events[-1] and not events[-1]["type"].endswith(kind):
            events.append(await self.next())
        return events

    async def _take(self, message: Mapping[str, Any]) -> None:
        await self.can_read.wait()
        kind = message["type"]
        if kind == "websocket.accept":
            self.status, self.subprotocol = 101, message["subprotocol"]
        elif kind == "websocket.http.response.start":
            self.status = message["status"]
        elif kind == "websocket.http.response.body":
            self.body += message.get("body", b"")
        else:
            if kind == "websocket.close":
                self.close_code = message["code"]
            self._from_server.put_nowait(dict(message))
        if "headers" in message:
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        if kind == "websocket.accept" or (kind.endswith("body") and not message.get("more_body", False)):
            self._has_answer.set()
