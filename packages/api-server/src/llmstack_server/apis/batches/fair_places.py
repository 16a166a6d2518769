"""Places of the requests of batches, for which API keys take turns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llmstack_core_scheduler import FairQueue, Request
from llmstack_types import EngineCoreRequest, SamplingParams

# Tokens of one key before the next one has its turn. Fewer than the scheduler's: places are few, and taken for long.
QUANTUM = 256
# An answer tells its tokens; more than a context has are none.
MAX_TOKENS = 1 << 20


class Place:
    """A place, while it is taken.

    Attributes:
        num_tokens: What the request has cost, which its key pays for in later rounds.
    """

    def __init__(self) -> None:
        self.num_tokens = 0


class FairPlaces:
    """A number of places, given by the deficit round robin of the scheduler's waiting queue.

    What a request costs is known at its end. Until then its key is charged the quantum.
    """

    def __init__(self, num_places: int, quantum: int = QUANTUM) -> None:
        self._num_free = num_places
        self._quantum = quantum
        self._queue = FairQueue(quantum)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[Place]:
        """Waits for a place, and gives it back with the context."""
        number = next(self._numbers)
        arrival = EngineCoreRequest(str(number), [0], SamplingParams(), tenant=tenant)
        request = Request(arrival, (number,), self._quantum)
        await self._wait(request)
        place = Place()
        try:
            yield place
        finally:
            request.token_ids = [0] * min(place.num_tokens, MAX_TOKENS)
            self._leave(request)

    async def _wait(self, request: Request) -> None:
        self._queue.add(request)
        waiting = self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        self._give()
        try:
            await waiting
        except asyncio.CancelledError:
            if self._waiting.pop(request.request_id, None) is not None:
                self._queue.remove(request)
            else:  # its turn came at the same moment
                request.token_ids = []
                self._leave(request)
            raise

    def _leave(self, request: Request) -> None:
        self._queue.finish(request)
        self._num_free += 1
        self._give()

    def _give(self) -> None:
        while self._num_free and (request := self._queue.order().next()) is not None:
            self._queue.admit(request, 0)
            self._num_free -= 1
            waiting = self._waiting.pop(request.request_id)
            if not waiting.done():
                waiting.set_result(None)
