"""Shares of something that is bounded, such as pixels being decoded, between keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from llmstack_types import ServerOverloadedError


@dataclass(slots=True, eq=False)
class _Waiter:
    amount: int
    turn: asyncio.Future[None]


class FairBudget:
    """An amount that is held while work goes on. A key that holds least is next, and none holds more than its share."""

    def __init__(self, amount: int, key_amount: int, *, max_waiting: int = 512, reason: str = "media") -> None:
        """The limits.

        Args:
            amount: Of all keys together.
            key_amount: Of one key.
            max_waiting: Waiters of all keys. One key has at most as many as are left to others.
            reason: The label of the refusals' metric.
        """
        self._amount = amount
        self._key_amount = key_amount
        self._max_waiting = max_waiting
        self._reason = reason
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Waiters of all keys."""
        return sum(map(len, self._waiting.values()))

    @property
    def held(self) -> int:
        """The amount that is held now."""
        return self._held.total()

    @contextlib.asynccontextmanager
    async def hold(self, tenant: str, amount: int) -> AsyncIterator[None]:
        """Holds an amount, once it is free. One that exceeds a limit by itself is cut to that limit.

        Raises:
            ServerOverloadedError: Too many are waiting.
        """
        amount = min(amount, self._amount, self._key_amount)
        await self._acquire(tenant, amount)
        try:
            yield
        finally:
            self._release(tenant, amount)

    async def _acquire(self, tenant: str, amount: int) -> None:
        if not self._waiting and self._fits(tenant, amount):
            self._held[tenant] += amount
            return
        num_own = len(self._waiting.get(tenant, ()))
        if num_own >= self._max_waiting - self.num_waiting:
            raise ServerOverloadedError("too many files are waiting to be read", reason=self._reason)
        waiter = _Waiter(amount, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiter)
        self._start()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.cancelled():
                self._leave(tenant, waiter)
            else:  # it was this one's turn already
                self._release(tenant, amount)
            raise

    def _fits(self, tenant: str, amount: int) -> bool:
        return self.held + amount <= self._amount and self._held[tenant] + amount <= self._key_amount

    def _release(self, tenant: str, amount: int) -> None:
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]
        self._start()

    def _leave(self, tenant: str, waiter: _Waiter) -> None:
        queue = self._waiting.get(tenant, deque())
        if waiter in queue:  # or another one's turn found it cancelled
            queue.remove(waiter)
            if not queue:
                del self._waiting[tenant]
        self._start()

    def _start(self) -> None:
        """Lets those begin that fit. While the next one does not fit in the whole, nothing overtakes it."""
        while self._waiting:
            able = [name for name, queue in self._waiting.items() if self._has_share(name, queue[0].amount)]
            if not able:
                return
            tenant = min(able, key=lambda name: self._held[name])
            queue = self._waiting[tenant]
            if not queue[0].turn.cancelled() and not self._fits(tenant, queue[0].amount):
                return
            waiter = queue.popleft()
            if not queue:
                del self._waiting[tenant]
            if not waiter.turn.cancelled():
                self._held[tenant] += waiter.amount
                waiter.turn.set_result(None)

    def _has_share(self, tenant: str, amount: int) -> bool:
        return self._held[tenant] + amount <= self._key_amount
