"""A queue for expensive work, of which one piece runs at a time."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator


class Turns:
    """A lock whose waiting tasks are sorted by the size of their work, smaller work first.

    Work is overtaken by smaller work of at most its own size in all. For one event loop.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._is_taken = False
        self._started_size = 0
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Waits for the turn of work of some size, and ends it with the context."""
        if self._is_taken:
            await self._wait(size)
        self._is_taken = True
        self._started_size += size
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, size: int) -> None:
        entry = asyncio.get_running_loop().create_future()
        # The rank grows with what has been started meanwhile, so later work overtakes only for so long.
        heapq.heappush(self._waiting, (self._started_size + size, next(self._numbers), entry))
        try:
            await entry
        except asyncio.CancelledError:
            if entry.done() and not entry.cancelled():  # its turn came at the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            entry = heapq.heappop(self._waiting)[2]
            if not entry.done():  # else its caller has left
                entry.set_result(None)
                return
        self._is_taken = False
