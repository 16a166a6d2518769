"""Requests of a batch on their way to the engine, below all other requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from llmstack_server.apis.batches.fair_places import FairPlaces, Place
from llmstack_server.apis.batches.lines import BatchAnswer, BatchRequest
from llmstack_server.apis.batches.transport import Transport, TransportError

RETRIED_STATUSES = frozenset({429, 503})
# Refusals by the load of the server: where there is none, the request does not fit.
LOAD_CODES = frozenset({"server_is_overloaded", "deadline_unreachable", "rate_limit_exceeded"})
MAX_IDLE_REFUSALS = 3


class LiveTraffic(Protocol):
    """Requests beside those of batches.

    Attributes:
        is_busy: Whether some of them wait for the engine, which come first.
        is_idle: Whether none waits or runs.
    """

    @property
    def is_busy(self) -> bool: ...

    @property
    def is_idle(self) -> bool: ...

    async def wait_until_drained(self) -> None:
        """Returns when `is_busy` may have become false."""
        ...


class Sender:
    """Sends the requests of one batch.

    Attributes:
        places: The places of all batches.
        max_body_bytes: The largest body that the server takes.
    """

    def __init__(
        self,
        transport: Transport,
        places: FairPlaces,
        traffic: LiveTraffic,
        max_body_bytes: int,
    ) -> None:
        self.places = places
        self.max_body_bytes = max_body_bytes
        self._transport = transport
        self._traffic = traffic
        self._line_to_num_refusals: Counter[int] = Counter()

    async def wait_for_turn(self, has_ended: Callable[[], bool]) -> None:
        """Waits until no other request waits, or the batch has ended."""
        while self._traffic.is_busy and not has_ended():
            await self._traffic.wait_until_drained()

    async def send(self, request: BatchRequest, place: Place) -> BatchAnswer | None:
        """The answer; None where the server has no room for the request now.

        A request that is refused several times though no other one waits or runs does not fit: that is its answer.
        """
        is_idle = self._traffic.is_idle
        try:
            answer = await self._transport.send(request)
        except TransportError:
            return None
        if answer.status in RETRIED_STATUSES:
            self._line_to_num_refusals[request.line] += is_idle and answer.error_code in LOAD_CODES
            if self._line_to_num_refusals[request.line] < MAX_IDLE_REFUSALS:
                return None
        del self._line_to_num_refusals[request.line]
        place.num_tokens = answer.num_tokens
        return answer
