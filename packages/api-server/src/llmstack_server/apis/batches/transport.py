"""Transport of a batch to the application in this process, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.types import ASGIApp, Message

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.lines import BatchAnswer, BatchRequest
from llmstack_server.web.clients import Client, current_client
from llmstack_types import EngineDeadError


class TransportError(Exception):
    """The connection failed before an answer came. The request may be sent again."""


class Transport(Protocol):
    """Sends a request and returns its answer."""

    async def send(self, request: BatchRequest) -> BatchAnswer:
        """The answer; raises TransportError where a retry may help, BatchError where none can."""
        ...


class UnneededTransport:
    """The transport of a batch without requests to send."""

    async def send(self, request: BatchRequest) -> BatchAnswer:
        """Raises BatchError: the input has changed since it was read first."""
        raise BatchError("the input has changed while it was read; run the same command again to continue")


class AppTransport:
    """Calls an ASGI application without a socket."""

    def __init__(self, app: ASGIApp, check_health: Callable[[], Awaitable[None]], client: Client | None = None) -> None:
        """`check_health` raises EngineDeadError once the engine core has ended; `client` needs no key."""
        self._app = app
        self._check_health = check_health
        self._client = client

    async def send(self, request: BatchRequest) -> BatchAnswer:
        """The application's answer; raises BatchError once the engine core has ended."""
        exchange = _Exchange(request.content, request.media_type)
        scope = exchange.scope(request.url)
        if self._client is not None:
            scope["state"] = {"client": self._client}
            current_client.set(self._client)  # what checks keys does so, too, but it is not on every server
        await self._app(scope, exchange.receive, exchange.send)
        if exchange.status >= 500:
            try:
                await self._check_health()
            except EngineDeadError as error:
                raise BatchError(
                    f"the engine core has ended: {error}; run the same command again to continue"
                ) from error
        return BatchAnswer(exchange.status, exchange.headers.get("x-request-id", ""), exchange.answer())


class _Exchange:
    """One request and its answer in the form of ASGI."""

    def __init__(self, content: bytes, media_type: str) -> None:
        self._content: bytes | None = content
        self._media_type = media_type
        self._size = len(content)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()

    def scope(self, path: str) -> dict[str, object]:
        headers = [(b"content-type", self._media_type.encode()), (b"content-length", str(self._size).encode())]
        path, _, query = path.partition("?")
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "client": ("batch", 0), "server": ("batch", 0), "headers": headers,
        }  # fmt: skip

    def answer(self) -> object:
        return decoded(self.body, self.headers.get("content-type", ""))

    async def receive(self) -> Message:
        if self._content is None:
            await asyncio.Event().wait()  # this client never disconnects; the application stops waiting by itself
        content, self._content = self._content, None
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")


def decoded(body: bytes | bytearray, media_type: str = "") -> object:
    """The value of a body as JSON, or its text; of a body that should be JSON and is not, the beginning."""
    if media_type.startswith("text/plain"):
        return bytes(body).decode("utf-8", "replace")
    try:
        return json.loads(body)
    except ValueError:
        return bytes(body[:1024]).decode("utf-8", "replace")
