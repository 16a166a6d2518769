"""The events of one response, for any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class EventLog:
    """Framed events in the order of their sequence numbers, from 0; any number of readers follow it.

    Where events are kept on a disk, readers get them from there on only: what a reader has seen survives.
    """

    def __init__(self, events: list[bytes] | None = None, *, is_held: bool = False) -> None:
        """`events`: Those so far, which readers may see. `is_held`: Whether readers wait for `reveal`."""
        self._events = events or []
        self.num_bytes = sum(map(len, self._events))
        self._num_visible = len(self._events)
        self._is_held = is_held
        self._is_closed = False
        self._make_last_event: Callable[[int], bytes] | None = None
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def append(self, event: bytes) -> None:
        """Adds an event for every reader."""
        self._events.append(event)
        self.num_bytes += len(event)
        if not self._is_held:
            self.reveal(len(self._events))

    def reveal(self, num_events: int) -> None:
        """Makes the first `num_events` events visible to readers."""
        if num_events > self._num_visible:
            self._num_visible = num_events
            self._tell()

    def release(self) -> None:
        """Makes all events visible to readers, and later ones at once."""
        self._is_held = False
        self.reveal(len(self._events))

    def close(self) -> None:
        """Marks the last event as the end of the log."""
        self._is_closed = True
        self._tell()

    def end_early(self, make_event: Callable[[int], bytes]) -> None:
        """Ends the readers with an event that is not of the log, after the events that they may see.

        `make_event` gets the number of the last event that a reader has seen, since others may have seen fewer.
        """
        self._make_last_event = make_event
        self._tell()

    def since(self, start: int) -> list[bytes]:
        """The events from the sequence number `start` on, whether readers may see them or not."""
        return self._events[start:]

    async def read(self, start: int, *, max_events: int = 1024) -> tuple[list[bytes], bool]:
        """Events from the sequence number `start` on, once there are some, and whether they are the last."""
        while start >= self._num_visible and not self._is_over:
            if self._make_last_event is not None:
                return [self._make_last_event(max(0, start - 1))], True
            await self._news.wait()
        events = self._events[start : min(start + max_events, self._num_visible)]
        return events, self._is_over and start + len(events) >= len(self._events)

    @property
    def _is_over(self) -> bool:
        return self._is_closed and self._num_visible == len(self._events)

    def _tell(self) -> None:
        """Wakes the waiting readers; later ones wait for the next event."""
        self._news.set()
        self._news = asyncio.Event()
