"""An ASGI client without sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmstack_server.web.keep_alive import PART_WRITER


@dataclass(slots=True)
class Answer:
    """One HTTP answer; `parts` are the parts of the body as they were sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        """The body, decoded from JSON."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The decoded events of a stream, `[DONE]` as a string. Comments, which keep a slow one open, are none."""
        parts = [part for part in self.body.decode().split("\n\n") if part and not part.startswith(":")]
        texts = [re.sub(r"\A(event: .*\n)?data: ", "", part) for part in parts]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


async def call(
    app: Any,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str | None] | None = None,
    *,
    disconnect_after_parts: int | None = None,
    disconnect_after_bytes: int | None = None,
    has_room: Callable[[], bool] | None = None,
    body_comes: asyncio.Event | None = None,
) -> Answer:
    """Calls an ASGI application without a socket; `body` is sent as JSON unless it is bytes.

    `path` may end with a query. A header that is None is not sent.

    The client stays until the answer is complete, or disconnects after `disconnect_after_parts` parts of it, or
    after `disconnect_after_bytes` bytes, where later ones are lost. With `has_room` its connection also takes parts
    past ASGI (`PartWriter`). It sends the body once `body_comes` is set.
    """
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    all_headers = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
    path, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "client": ("test", 1),
        "server": ("test", 80), "state": {},
        "headers": [(k.lower().encode(), v.encode()) for k, v in all_headers.items() if v is not None],
    }  # fmt: skip
    connection = _Connection(content, disconnect_after_parts, disconnect_after_bytes, has_room)
    connection.body_comes = body_comes
    if has_room is not None:
        scope["state"] = {PART_WRITER: connection}
    if disconnect_after_parts == 0:
        asyncio.get_running_loop().call_later(0.02, connection.has_left.set)
    await app(scope, connection.receive, connection)
    return connection.answer


class _Connection:
    """The connection of one client: the `send` of its request, and its own `PartWriter` if it has one."""

    def __init__(
        self, content: bytes, max_parts: int | None, max_bytes: int | None, has_room: Callable[[], bool] | None
    ) -> None:
        self.answer = Answer()
        self.has_left = asyncio.Event()
        self.body_comes: asyncio.Event | None = None
        self.flow = self
        self._has_room = has_room
        self._max_parts = max_parts
        self._max_bytes = max_bytes
        self._pending = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive(self) -> dict[str, Any]:
        """The request, then the end of the connection."""
        if self._pending:
            if self.body_comes is not None:
                await self.body_comes.wait()
            return self._pending.pop()
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def __call__(self, message: Mapping[str, Any]) -> None:
        """Takes one message of ASGI."""
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
            return
        self.write(bytes(message.get("body", b"")), is_complete=not message.get("more_body", False))

    @property
    def write_paused(self) -> bool:
        """Whether it takes no part past ASGI now."""
        return self._has_room is None or not self._has_room()

    def write(self, part: bytes, *, is_complete: bool = False) -> None:
        """Takes a part of the body."""
        if self.has_left.is_set():
            return
        parts = self.answer.parts
        if self._max_bytes is not None:
            part = part[: self._max_bytes - len(self.answer.body)]
            if len(self.answer.body) + len(part) >= self._max_bytes:
                self.has_left.set()
        parts.append(part)
        if is_complete or (self._max_parts is not None and len(parts) >= self._max_parts):
            self.has_left.set()
