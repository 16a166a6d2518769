"""Turns at work outside of the scheduler, given as its fair queue gives them."""

from __future__ import annotations

from llmstack_core_scheduler.fair_queue import FairQueue
from llmstack_core_scheduler.request import Request
from llmstack_types import EngineCoreRequest, SamplingParams


class FairTurns:
    """The scheduler's deficit round robin over tenants, for work whose tokens are known at its end.

    Until then a tenant is charged the quantum. A piece of work has a number, which its caller chooses: they grow.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._queue = FairQueue(quantum)
        self._requests: dict[int, Request] = {}

    def add(self, number: int, tenant: str) -> None:
        """Work of a tenant waits from now on."""
        arrival = EngineCoreRequest(str(number), [0], SamplingParams(), tenant=tenant)
        self._requests[number] = Request(arrival, (number,), self._quantum)
        self._queue.add(self._requests[number])

    def remove(self, number: int) -> None:
        """Takes out work that still waits."""
        self._queue.remove(self._requests.pop(number))

    def begin_next(self) -> int | None:
        """Begins the work whose turn it is, and returns its number; None where none waits."""
        request = self._queue.order().next()
        if request is None:
            return None
        self._queue.admit(request, 0)
        return int(request.request_id)

    def end(self, number: int, num_tokens: int) -> None:
        """Ends work that was begun, and settles what it has cost."""
        self._queue.settle(self._requests.pop(number), num_tokens)
