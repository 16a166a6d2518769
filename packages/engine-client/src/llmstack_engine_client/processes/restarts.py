"""Limits of the restarts of an engine core, and the pauses between them."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Final

RESTART_WINDOW_S: Final = 60.0
MAX_BACKOFF_S: Final = 8.0
# What finding one among 500 requests takes. An engine core that crashes for another reason causes an endless search.
MAX_SEARCH_RESTARTS: Final = 12


class RestartLimits:
    """Counts the restarts within the last minute; those that narrow a search are counted apart."""

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts`: Within a minute."""
        self._max_restarts = max_restarts
        self._restart_times_s: deque[float] = deque()
        self._search_times_s: deque[float] = deque()

    def may_restart(self, *, is_search: bool) -> bool:
        """Counts one more; whether that is not too often."""
        now_s = monotonic()
        times_s, limit = (
            (self._search_times_s, MAX_SEARCH_RESTARTS) if is_search else (self._restart_times_s, self._max_restarts)
        )
        while times_s and now_s - times_s[0] > RESTART_WINDOW_S:
            times_s.popleft()
        times_s.append(now_s)
        return len(times_s) <= limit

    def backoff_s(self) -> float:
        """None before the first restart; then 1, 2, 4, ... seconds."""
        num_restarts = len(self._restart_times_s)
        return 0.0 if num_restarts < 2 else min(MAX_BACKOFF_S, 2.0 ** (num_restarts - 2))
