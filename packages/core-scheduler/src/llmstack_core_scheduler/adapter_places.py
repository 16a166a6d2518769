"""Places for distinct adapters in a step, which waiting requests share fairly."""

from __future__ import annotations

from collections.abc import Iterable

from llmstack_core_scheduler.request import Request

MAX_NUM_OVERTAKERS = 16
"""Requests of adapters with a place that may go before one that waits for a place.

With fewer, steps would be smaller than they need to be; with more, a rare adapter would wait longer.
"""


class AdapterPlaces:
    """The adapters of the requests that run, while others are admitted in one step.

    A request whose adapter has no place lets others go first: those without an adapter always, those of adapters with
    a place a limited number of times. Then these adapters' requests run to their ends, and a place becomes free.
    """

    __slots__ = ("_blocked", "_limit", "_placed")

    def __init__(self, running: Iterable[Request], limit: int) -> None:
        """`limit`: Most distinct adapters; 0 is no limit."""
        self._placed: set[str] = set()
        if limit:
            self._placed.update(name for request in running if (name := request.arrival.lora_name) is not None)
        self._limit = limit
        self._blocked: Request | None = None

    def has_room(self, request: Request) -> bool:
        """Whether the request may be admitted now."""
        name, blocked = request.arrival.lora_name, self._blocked
        if name is None or not self._limit:
            return True
        if name in self._placed:
            return blocked is None or blocked.num_overtakers < MAX_NUM_OVERTAKERS
        if blocked is None and len(self._placed) < self._limit:
            return True
        self._blocked = blocked or request
        return False

    def add(self, request: Request) -> None:
        """Notes that a request has been admitted."""
        name = request.arrival.lora_name
        if name is not None:
            self._placed.add(name)
            if self._blocked is not None:
                self._blocked.num_overtakers += 1
