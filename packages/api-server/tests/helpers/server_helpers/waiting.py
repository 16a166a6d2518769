"""Waiting for conditions without an event of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Returns once `condition` holds; raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (any condition: there is no event to wait for)
            await asyncio.sleep(0.001)


class Clock:
    """A clock that stands still; `now_s` is its time."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
