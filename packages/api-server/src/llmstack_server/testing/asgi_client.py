"""An ASGI client without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
        """The decoded events of a stream, `[DONE]` as a string."""
        texts = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


async def call(
    app: Any,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    disconnect_after_parts: int | None = None,
    disconnect_after_bytes: int | None = None,
    state: Mapping[str, Any] | None = None,
) -> Answer:
    """Calls an ASGI application without a socket; `body` is sent as JSON unless it is bytes.

    `path` may end with a query.

    The client stays until the answer is complete, or disconnects after `disconnect_after_parts` parts of it, or
    after `disconnect_after_bytes` bytes, where later ones are lost. `state` is what a server adds to the scope.
    """
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    all_headers = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
    path, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "client": ("test", 1),
        "server": ("test", 80), "headers": [(k.lower().encode(), v.encode()) for k, v in all_headers.items()],
        "state": dict(state or {}),
    }  # fmt: skip
    answer = Answer()
    has_left = asyncio.Event()
    pending = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if pending:
            return pending.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
            return
        if has_left.is_set():
            return
        part = bytes(message.get("body", b""))
        if disconnect_after_bytes is not None:
            part = part[: disconnect_after_bytes - len(answer.body)]
            if len(answer.body) + len(part) >= disconnect_after_bytes:
                has_left.set()
        answer.parts.append(part)
        is_complete = not message.get("more_body", False)
        if is_complete or (disconnect_after_parts is not None and len(answer.parts) >= disconnect_after_parts):
            has_left.set()

    if disconnect_after_parts == 0:
        asyncio.get_running_loop().call_later(0.02, has_left.set)
    await app(scope, receive, send)
    return answer
