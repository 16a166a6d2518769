"""A server over a scripted engine, on a port of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from llmstack_server.options.config import HTTPConfig
from llmstack_server.serving.server import Server
from llmstack_server.serving.sockets import bind_socket
from llmstack_server.state.lifecycle import Lifecycle, LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, ready_state
from server_helpers.waiting import wait_until

STREAM = {"prompt": "Hello", "max_tokens": 100, "stream": True}


class Running:
    """One server with its engine, on a port of its own."""

    def __init__(self, http: HTTPConfig | None = None, *, is_engine_open: bool = True) -> None:
        self.engine = FakeEngineClient()
        self.engine.readiness.clear()
        self.state: ServerState = ready_state(self.engine, http or HTTPConfig(uvicorn_log_level="critical"))
        self.state.lifecycle = Lifecycle()
        self.state.lifecycle.advance(LifecycleState.LOADING_MODEL)
        self.listener = bind_socket("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.num_ready_calls = 0
        self.opening: asyncio.Future[Any] | None = None
        if not is_engine_open:
            self.state.opened_engine, self.opening = None, asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(Server(self.state, self.listener, self.opening).run(self._on_ready))

    async def _on_ready(self) -> None:
        self.num_ready_calls += 1

    async def become_ready(self) -> None:
        self.engine.readiness.set()
        await wait_until(lambda: self.state.lifecycle.is_ready)

    async def send(self, raw: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(raw)
        return reader, writer

    async def ask(self, raw: bytes) -> tuple[int, dict[str, str], bytes]:
        """Sends bytes; the answer, which ends with the connection."""
        reader, writer = await self.send(raw)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:]), body

    async def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        return await self.ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())

    async def post(self, body: Any) -> tuple[int, dict[str, str], bytes]:
        return await self.ask(post_bytes(body, "Connection: close\r\n"))


def post_bytes(body: Any, headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


Start = Callable[..., Awaitable[Running]]
