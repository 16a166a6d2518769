"""Requests in flight: a drain waits for their ends, or ends them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class InFlight:
    """The number of requests in flight, and whether they are to end at once.

    Attributes:
        tenant_to_sessions: Realtime sessions of each tenant.
    """

    def __init__(self) -> None:
        self.tenant_to_sessions: Counter[str] = Counter()
        self._is_cut = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._cuts: set[asyncio.Future[None]] = set()
        self._num_readers = 0
        self._ending = asyncio.Event()

    def ask_to_end(self) -> None:
        """Announces the end of the server to connections without an end of their own, such as WebSockets."""
        self._ending.set()

    @property
    def is_ending(self) -> bool:
        """Whether the server ends."""
        return self._ending.is_set()

    async def wait_for_end(self) -> None:
        """Returns once `ask_to_end` was called."""
        await self._ending.wait()

    @property
    def count(self) -> int:
        """The number of requests in flight."""
        return len(self._cuts) - self._num_readers

    @contextmanager
    def track_reader(self) -> Iterator[asyncio.Future[None]]:
        """As `track`, for a connection that reads the answer of another request; it is not counted."""
        self._num_readers += 1
        try:
            with self.track() as cut:
                yield cut
        finally:
            self._num_readers -= 1

    @contextmanager
    def track(self) -> Iterator[asyncio.Future[None]]:
        """Counts one request until the block ends; the future is done once the request has to end at once."""
        cut = asyncio.get_running_loop().create_future()
        if self._is_cut:
            cut.set_result(None)
        self._cuts.add(cut)
        self._idle.clear()
        try:
            yield cut
        finally:
            self._cuts.discard(cut)
            if not self._cuts:
                self._idle.set()

    def cut(self) -> None:
        """Ends the remaining requests at once."""
        self._is_cut = True
        for cut in self._cuts:
            if not cut.done():
                cut.set_result(None)

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no request is in flight; False if that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
