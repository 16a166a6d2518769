"""Transports to a server: its application in this process, or HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message

from llmstack_server.commands.batch.errors import BatchError
from llmstack_server.commands.batch.lines import BatchAnswer, BatchRequest
from llmstack_types import EngineDeadError

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 3600.0


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

    def __init__(self, app: ASGIApp, check_health: Callable[[], Awaitable[None]]) -> None:
        """`check_health` raises EngineDeadError once the engine core has ended."""
        self._app = app
        self._check_health = check_health

    async def send(self, request: BatchRequest) -> BatchAnswer:
        """The application's answer; raises BatchError once the engine core has ended."""
        exchange = _Exchange(json.dumps(request.body).encode("utf-8", "replace"))
        await self._app(exchange.scope(request.url), exchange.receive, exchange.send)
        if exchange.status >= 500:
            try:
                await self._check_health()
            except EngineDeadError as error:
                raise BatchError(
                    f"the engine core has ended: {error}; run the same command again to continue"
                ) from error
        return BatchAnswer(exchange.status, exchange.headers.get("x-request-id", ""), _decoded(exchange.body))


class _Exchange:
    """One request and its answer in the form of ASGI."""

    def __init__(self, content: bytes) -> None:
        self._content: bytes | None = content
        self._size = len(content)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()

    def scope(self, path: str) -> dict[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(self._size).encode())]
        path, _, query = path.partition("?")
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "client": ("batch", 0), "server": ("batch", 0), "headers": headers,
        }  # fmt: skip

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


class HttpTransport:
    """Sends requests to the server at a URL, from one thread per request in flight."""

    def __init__(self, url: str, api_key: str | None, max_concurrency: int) -> None:
        """Makes no connection yet.

        Raises:
            BatchError: `url` is not the address of a server.
        """
        try:
            self._is_https, self._host, self._port = _parse(url)
        except ValueError:
            raise BatchError(f"--url: '{url[:80]}' is not a URL such as http://localhost:8000", exit_code=2) from None
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix="run-batch")
        self._local = threading.local()
        self._open: set[http.client.HTTPConnection] = set()

    async def send(self, request: BatchRequest) -> BatchAnswer:
        """The server's answer; raises TransportError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._exchange, request)

    def close(self) -> None:
        """Aborts the requests in flight and closes all connections."""
        for connection in list(self._open):
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(cancel_futures=True)
        for connection in self._open:
            connection.close()

    def _exchange(self, request: BatchRequest) -> BatchAnswer:
        connection = self._connection()
        try:
            if connection.sock is None:
                connection.connect()
                connection.sock.settimeout(READ_TIMEOUT_S)  # type: ignore[attr-defined]  # `connect` has set it
            connection.request("POST", request.url, json.dumps(request.body).encode(), self._headers)
            response = connection.getresponse()
            body = _decoded(response.read())
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            reason = str(error) or type(error).__name__
            raise TransportError(f"{self._host}:{self._port}: {reason}") from error
        return BatchAnswer(response.status, response.headers.get("x-request-id", ""), body)

    def _connection(self) -> http.client.HTTPConnection:
        """The connection of the calling thread."""
        found: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if found is None:
            kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
            found = kind(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
            self._local.connection = found
            self._open.add(found)
        return found


def _parse(url: str) -> tuple[bool, str, int]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/") not in ("", "/v1"):
        raise ValueError(url)
    is_https = parts.scheme == "https"
    return is_https, parts.hostname, parts.port or (443 if is_https else 80)


def _decoded(body: bytes | bytearray) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return bytes(body[:1024]).decode("utf-8", "replace")
