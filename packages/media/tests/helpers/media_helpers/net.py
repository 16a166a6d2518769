"""A net of hosts that a fetcher dials without a connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from llmstack_media.fetch.fetcher import Fetcher
from llmstack_media.fetch.policy import FetchPolicy

PUBLIC = "93.184.216.34"
OPEN = FetchPolicy(domains=("*",), timeout_s=2.0, max_bytes=1000)
PICTURE = bytes(range(200))


def answer(body: bytes = PICTURE, status: str = "200 OK", headers: str = "", *, length: int | None = None) -> bytes:
    declared = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {declared}\r\n{headers}\r\n".encode() + body


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self.is_aborted

    def close(self) -> None:
        self.is_aborted = True

    def abort(self) -> None:
        self.is_aborted = True


@dataclass
class Net:
    """Hosts with their addresses, and what each of them answers, by host and path."""

    addresses: dict[str, list[str]] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)
    resolved: list[str] = field(default_factory=list)
    dialled: list[tuple[str, int, str | None]] = field(default_factory=list)
    transports: list[FakeTransport] = field(default_factory=list)
    is_open: bool = False
    """Whether connections stay open behind their answer."""

    async def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(host)
        return self.addresses.get(host, [PUBLIC])

    async def connect(
        self, address: str, port: int, server_name: str | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.dialled.append((address, port, server_name))
        reader = asyncio.StreamReader()
        transport = FakeTransport()
        self.transports.append(transport)
        loop = asyncio.get_running_loop()
        writer = asyncio.StreamWriter(transport, asyncio.StreamReaderProtocol(reader), reader, loop)

        def feed() -> None:
            path, host = transport.sent.split(b" ")[1].decode(), transport.sent.split(b"Host: ")[1].split(b"\r")[0]
            reader.feed_data(self.answers.get(f"{host.decode()}{path}", answer()))
            if not self.is_open:
                reader.feed_eof()

        loop.call_soon(feed)
        return reader, writer

    def fetcher(self, policy: FetchPolicy = OPEN) -> Fetcher:
        return Fetcher(policy, resolve=self.resolve, connect=self.connect)
