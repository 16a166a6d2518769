"""Protocols of what is shut down, and their one meaning."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Closing(Protocol):
    """An object with processes, threads, memory or files to give back."""

    def shutdown(self) -> None:
        """Gives back all of it. Idempotent. Where nothing else is said, there is nothing."""
        return


class AsyncClosing(Protocol):
    """An object of an event loop with something to give back."""

    async def shutdown(self) -> None:
        """Gives back all of it. Idempotent. Where nothing else is said, there is nothing."""
        return


class ClosingParts(AsyncClosing):
    """An object that gives back what its parts have, and nothing else.

    Attributes:
        closing: The parts; more may be appended when they are made.
    """

    def __init__(self, *parts: AsyncClosing) -> None:
        self.closing: list[AsyncClosing] = list(parts)

    async def shutdown(self) -> None:
        """Shuts all parts down, at the same time. Idempotent, as they are."""
        await asyncio.gather(*(part.shutdown() for part in self.closing))
