"""The number of realtime sessions, in all and of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from llmstack_server.options.http_options import RealtimeConfig
from llmstack_server.state.peers import Peers
from llmstack_server.web.errors import HTTPError, rate_limit_exceeded, server_is_overloaded

TOPIC: Final = "realtime_sessions"
_RETRY_S: Final = 5.0


class Sessions:
    """Counts the sessions of one API process, and asks the other ones of the server for theirs.

    A place is taken before they are asked. So of two processes that give the last one at the same time both may refuse,
    and the limits hold. A process that gives no answer has ended, or is starting, and has no sessions.
    """

    def __init__(self, limits: RealtimeConfig, tenant_to_count: Counter[str], peers: Peers | None = None) -> None:
        """`tenant_to_count`: The sessions of this process; those of other models are among them."""
        self._limits = limits
        self._peers = peers
        self._tenant_to_count = tenant_to_count
        if peers is not None:
            peers.add_topic(TOPIC, self._answer)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Holds the place of one session until the block ends.

        Raises:
            HTTPError: 429, the key has all of its sessions; 503, there are none left.
        """
        self._tenant_to_count[tenant] += 1
        try:
            self._check(*self._counts(tenant))
            if self._peers is not None:
                others = await self._peers.ask(f"{TOPIC} {tenant}")
                self._check(*map(sum, zip(self._counts(tenant), *others, strict=True)))
            yield
        finally:
            self._tenant_to_count[tenant] -= 1
            if not self._tenant_to_count[tenant]:
                del self._tenant_to_count[tenant]

    def _counts(self, tenant: str) -> tuple[int, int]:
        """Sessions of this process: of a key, and in all."""
        return self._tenant_to_count[tenant], self._tenant_to_count.total()

    def _check(self, num_of_key: int, num_in_all: int) -> None:
        if num_of_key > self._limits.max_sessions_per_key:
            reason = f"At most {self._limits.max_sessions_per_key} realtime sessions with one API key."
            raise HTTPError(rate_limit_exceeded(reason, _RETRY_S))
        if num_in_all > self._limits.max_sessions:
            raise HTTPError(server_is_overloaded(_RETRY_S))

    async def _answer(self, tenant: str) -> tuple[int, int]:
        return self._counts(tenant)
