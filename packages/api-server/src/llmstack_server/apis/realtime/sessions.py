"""The number of realtime sessions, in all and of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from llmstack_server.options.http_options import RealtimeConfig
from llmstack_server.web.errors import HTTPError, rate_limit_exceeded, server_is_overloaded

_RETRY_S: Final = 5.0


class Sessions:
    """Counts the sessions of one API process."""

    def __init__(self, limits: RealtimeConfig) -> None:
        self._limits = limits
        self._tenant_to_count: Counter[str] = Counter()

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Holds the place of one session until the block ends.

        Raises:
            HTTPError: 429, the key has all of its sessions; 503, there are none left.
        """
        if self._tenant_to_count[tenant] >= self._limits.max_sessions_per_key:
            reason = f"At most {self._limits.max_sessions_per_key} realtime sessions with one API key."
            raise HTTPError(rate_limit_exceeded(reason, _RETRY_S))
        if self._tenant_to_count.total() >= self._limits.max_sessions:
            raise HTTPError(server_is_overloaded(_RETRY_S))
        self._tenant_to_count[tenant] += 1
        try:
            yield
        finally:
            self._tenant_to_count[tenant] -= 1
            if not self._tenant_to_count[tenant]:
                del self._tenant_to_count[tenant]
