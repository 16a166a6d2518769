"""Who may overtake a request that waits for an adapter or the encoder."""

from __future__ import annotations

from collections.abc import Iterable

from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.waiting_queue import AdmissionOrder

MAX_NUM_OVERTAKERS = 16
"""Requests that may go before one that waits, though they hold what it waits for.

With fewer, steps would be smaller than they need to be; with more, a rare adapter or a new item would wait longer.
"""


class AdapterPlaces:
    """The adapters of the requests that run, while others are admitted in one step.

    A request whose adapter has no place lets others go first: those without an adapter always, those of adapters with
    a place a limited number of times. Then these adapters' requests run to their ends, and a place becomes free.

    So does one whose item has no room in the encoder cache, or has to wait until another is encoded: others with items
    go first a limited number of times. Then the requests that hold the room run to their ends.
    """

    __slots__ = ("_blocked", "_limit", "_placed", "_unencoded")

    def __init__(self, running: Iterable[Request], limit: int) -> None:
        """`limit`: Most distinct adapters; 0 is no limit."""
        self._placed: set[str] = set()
        if limit:
            self._placed.update(name for request in running if (name := request.arrival.lora_name) is not None)
        self._limit = limit
        self._blocked: Request | None = None
        self._unencoded: Request | None = None

    def wait_for_encoder(self, request: Request, order: AdmissionOrder) -> None:
        """Lets others overtake a request whose item is not encoded, and cannot be in this step."""
        order.skip(request)
        self._unencoded = self._unencoded or request

    def has_room(self, request: Request) -> bool:
        """Whether the request may be admitted now."""
        if request.media and self._unencoded is not None and self._unencoded.num_overtakers >= MAX_NUM_OVERTAKERS:
            return False
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
        if request.media and self._unencoded is not None:
            self._unencoded.num_overtakers += 1
        name = request.arrival.lora_name
        if name is not None:
            self._placed.add(name)
            if self._blocked is not None:
                self._blocked.num_overtakers += 1
