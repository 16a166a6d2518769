"""The events of one response, kept so that its client can come back for them."""

from __future__ import annotations

import asyncio


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

    async def read(self, start: int, *, max_events: int = 1024) -> tuple[list[bytes], bool]:
        """Events from the sequence number `start` on as soon as there are some, and whether none will follow them."""
        while start >= len(self._events) and not self._is_closed:
            await self._news.wait()
        events = self._events[start : start + max_events]
        return events, self._is_closed and start + len(events) >= len(self._events)

    def _tell(self) -> None:
        """Wakes who waits now; who comes later waits for the next."""
        self._news.set()
        self._news = asyncio.Event()
