"""The events of one response, kept so that its client can come back for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class EventLog:
    """Framed events in the order of their sequence numbers, from 0; any number of readers follow it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_closed = False
        self._news = asyncio.Event()

    def append(self, event: bytes) -> None:
        """Adds an event, which every reader gets."""
        self._events.append(event)
        self.num_bytes += len(event)
        self._tell()

    def close(self) -> None:
        """No event will follow."""
        self._is_closed = True
        self._tell()

    async def follow(self, start: int = 0) -> AsyncIterator[bytes]:
        """The events from the sequence number `start` on, then new ones, until it is closed."""
        while True:
            while start < len(self._events):
                yield self._events[start]
                start += 1
            if self._is_closed:
                return
            await self._news.wait()

    def _tell(self) -> None:
        """Wakes who waits now; who comes later waits for the next."""
        self._news.set()
        self._news = asyncio.Event()
