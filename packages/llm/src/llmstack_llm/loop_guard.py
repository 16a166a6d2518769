"""The event loop that an object belongs to."""

from __future__ import annotations

import asyncio


class LoopGuard:
    """Remembers the loop of the first call, and refuses others: there nothing would ever wake who waits."""

    __slots__ = ("_loop",)

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self) -> None:
        """Raises RuntimeError in another loop than that of the first call."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(
                "AsyncLLM belongs to the event loop of its first call, and this is another one; "
                "use it within one asyncio.run(), or make an AsyncLLM in each"
            )
