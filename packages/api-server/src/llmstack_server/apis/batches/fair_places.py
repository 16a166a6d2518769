"""Places of the requests of batches, for which API keys take turns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llmstack_engine_client.fair_turns import FairTurns

# Tokens of one key before the next one has its turn. Fewer than the scheduler's: places are few, and taken for long.
QUANTUM = 256


class Place:
    """A place, while it is taken.

    Attributes:
        num_tokens: What the request has cost, which its key pays for in later rounds.
    """

    def __init__(self) -> None:
        self.num_tokens = 0


class FairPlaces:
    """A number of places, given by the deficit round robin of the scheduler's waiting queue."""

    def __init__(self, num_places: int, quantum: int = QUANTUM) -> None:
        self._num_free = num_places
        self._turns = FairTurns(quantum)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[Place]:
        """Waits for a place, and gives it back with the context."""
        number, place = next(self._numbers), Place()
        self._turns.add(number, tenant)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._give()
            await waiting
            yield place
        finally:
            if self._waiting.pop(number, None) is not None:  # cancelled before its turn
                self._turns.remove(number)
            else:
                self._turns.end(number, place.num_tokens)
                self._num_free += 1
                self._give()

    def _give(self) -> None:
        while self._num_free and (number := self._turns.begin_next()) is not None:
            self._num_free -= 1
            waiting = self._waiting.pop(number)
            if not waiting.done():
                waiting.set_result(None)
