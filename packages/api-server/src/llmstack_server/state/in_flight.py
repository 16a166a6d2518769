"""Requests in flight, which a drain waits for and can cut."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class InFlight:
    """The number of requests in flight, and whether they are to end at once."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._cut = asyncio.Event()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Counts one request until the block ends."""
        self.count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.count -= 1
            if self.count == 0:
                self._idle.set()

    @property
    def is_cut(self) -> bool:
        """True once the remaining requests have to end at once."""
        return self._cut.is_set()

    def cut(self) -> None:
        """Ends the remaining requests at once."""
        self._cut.set()

    async def wait_until_cut(self) -> None:
        """Returns when `cut` was called."""
        await self._cut.wait()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no request is in flight; False if that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
