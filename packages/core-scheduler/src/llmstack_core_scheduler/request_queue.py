"""Requests in the order of a scheduling policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol

from llmstack_core_scheduler.request import Rank, Request
from llmstack_types import EngineCoreRequest
from llmstack_types.engine_core import IMPLIED_DEADLINE_S

_rank_of = attrgetter("rank")


class SchedulingPolicy(Protocol):
    """Orders requests by a rank that is fixed when they arrive."""

    def rank(self, arrival: EngineCoreRequest, number: int) -> Rank:
        """The request's rank, smaller first; `number` counts arrivals and makes it unique."""
        ...


class FCFSPolicy:
    """First come, first served."""

    def rank(self, arrival: EngineCoreRequest, number: int) -> Rank:
        """Ranks earlier arrivals first."""
        return (arrival.arrival_time_s, number)


class PriorityPolicy:
    """Lower `priority` first, first come first served among equals."""

    def rank(self, arrival: EngineCoreRequest, number: int) -> Rank:
        """Lower priority first, then earlier."""
        return (arrival.priority, arrival.arrival_time_s, number)


class FairPolicy(FCFSPolicy):
    """Tenants take turns in the waiting queue, by tokens; first come, first served within each."""


class DeadlinePolicy(FairPolicy):
    """Tenants take turns as in `FairPolicy`; within each the earliest deadline goes first, while it can be met.

    A request without a deadline counts as one that is wanted `IMPLIED_DEADLINE_S` after its arrival. So those with
    deadlines overtake it for that long and no longer.
    """

    def rank(self, arrival: EngineCoreRequest, number: int) -> Rank:
        """Ranks earlier deadlines first, then earlier arrivals."""
        if arrival.deadline_s is None:
            return self.rank_without(arrival, number)
        return (arrival.deadline_s, arrival.arrival_time_s, number)

    @staticmethod
    def rank_without(arrival: EngineCoreRequest, number: float) -> Rank:
        """The rank of a request that has no deadline, or none any more."""
        return (arrival.arrival_time_s + IMPLIED_DEADLINE_S, arrival.arrival_time_s, number)


POLICIES: Mapping[str, SchedulingPolicy] = MappingProxyType(
    {"fcfs": FCFSPolicy(), "priority": PriorityPolicy(), "fair": FairPolicy(), "deadline": DeadlinePolicy()}
)


class RequestQueue:
    """Requests sorted by rank, the first to go at the front.

    A preempted request has the place of its rank: before all that arrived after it. Adding and
    removing cost O(log n) comparisons and a move of pointers, which at 100,000 requests is tens of microseconds.

    Attributes:
        requests: The requests in order, for reading.
    """

    __slots__ = ("requests",)

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def add(self, request: Request) -> None:
        """Puts the request where its rank belongs."""
        insort(self.requests, request, key=_rank_of)

    def remove(self, request: Request) -> None:
        """Takes out a request of the queue."""
        del self.requests[bisect_left(self.requests, request.rank, key=_rank_of)]

    def first(self) -> Request:
        """The request that goes first; the queue is not empty."""
        return self.requests[0]

    def last(self) -> Request:
        """The request that goes last; the queue is not empty."""
        return self.requests[-1]
