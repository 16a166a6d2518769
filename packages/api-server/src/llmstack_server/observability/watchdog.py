"""A watchdog for requests without progress, which it logs and counts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
MAX_NUM_NAMED = 16


class WatchedEngine(Protocol):
    """The part of an engine front end that the watchdog needs."""

    def find_stuck_requests(self, timeout_s: float) -> tuple[list[str], bool]:
        """Ids of the requests without progress for so long, and whether the engine core has stopped."""
        ...


class StuckWatchdog:
    """Checks every few seconds; each request is logged once.

    Attributes:
        is_engine_stuck: No step has ended for too long, though requests are in flight.
    """

    def __init__(
        self,
        timeout_s: float,
        report: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` 0 disables the checks; `report` receives the number of stuck requests."""
        self.is_engine_stuck = False
        self._timeout_s = timeout_s
        self._report = report
        self._clock = clock
        self._next_look_s = clock() + INTERVAL_S
        self._named: set[str] = set()

    def tick(self, engine: WatchedEngine) -> None:
        """Checks the requests, at most once per interval."""
        now_s = self._clock()
        if not self._timeout_s or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + INTERVAL_S
        request_ids, is_engine_stuck = engine.find_stuck_requests(self._timeout_s)
        self._report(len(request_ids))
        self._name(request_ids)
        if is_engine_stuck and not self.is_engine_stuck:
            logger.error(
                "the engine core has finished no step for %g s, though requests are in flight", self._timeout_s
            )
        self.is_engine_stuck = is_engine_stuck

    def _name(self, request_ids: list[str]) -> None:
        news = [request_id for request_id in request_ids if request_id not in self._named]
        self._named = set(request_ids)
        for request_id in news[:MAX_NUM_NAMED]:
            logger.warning("request %s is stuck: no progress for %g s", request_id, self._timeout_s)
        if len(news) > MAX_NUM_NAMED:
            logger.warning("%d more requests are stuck", len(news) - MAX_NUM_NAMED)
