"""Transport of a batch to a server over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.lines import BatchAnswer, BatchRequest
from llmstack_server.apis.batches.transport import TransportError, decoded

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 3600.0


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
        self._headers = {}
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
            headers = {**self._headers, "Content-Type": request.media_type}
            connection.request("POST", request.url, request.content, headers)
            response = connection.getresponse()
            body = decoded(response.read(), response.headers.get("content-type", ""))
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
