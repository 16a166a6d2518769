"""Deadlines within the shares of tenants: the earliest one that has not passed.

Between tenants the order is that of `FairQueue`, and no share depends on deadlines. Within a tenant requests go by the
ranks of `DeadlinePolicy`. One whose deadline has passed while it waited has none any more: it goes by its arrival. So
every request is overtaken for a bounded time: that of its deadline, or `IMPLIED_DEADLINE_S`. A request that arrives
after that time has a later deadline, or one that it loses.

The time is that of the step, which the step log has. So equal calls give equal decisions.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from llmstack_core_scheduler.fair_queue import FairOrder, FairQueue
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.request_queue import DeadlinePolicy, FairPolicy, SchedulingPolicy
from llmstack_core_scheduler.waiting_queue import WaitingQueue


class DeadlineQueue(FairQueue):
    """Waiting requests, admitted in fair shares of tokens, by deadline within each share.

    Attributes:
        num_missed: Counter of the deadlines that have passed while their requests waited to begin.
    """

    __slots__ = ("_with_deadlines", "num_missed")

    def __init__(self, quantum: int) -> None:
        super().__init__(quantum)
        self.num_missed = 0
        self._with_deadlines: list[Request] = []  # that have not begun, the earliest deadline first

    def add(self, request: Request) -> None:
        """Puts the request where its deadline belongs among those of its tenant."""
        super().add(request)
        if _can_lose_deadline(request):
            insort(self._with_deadlines, request, key=_rank_of)

    def remove(self, request: Request) -> None:
        """Takes out a request that leaves the queue, admitted or not."""
        super().remove(request)
        if _can_lose_deadline(request):
            self._forget_deadline(request)

    def order(self, now_s: float = 0.0, share: int = 0) -> FairOrder:
        """The order of the step that begins at `now_s`, without the deadlines that have passed."""
        waiting = self._with_deadlines
        while waiting and waiting[0].rank[0] <= now_s:
            request = waiting.pop(0)
            self.num_missed += 1
            request.has_lost_deadline = True
            self.change_rank(request, DeadlinePolicy.rank_without(request.arrival, request.rank[-1]))
        return super().order(now_s, share)

    def _forget_deadline(self, request: Request) -> None:
        del self._with_deadlines[bisect_left(self._with_deadlines, request.rank, key=_rank_of)]


def _rank_of(request: Request) -> tuple[float, ...]:
    return request.rank


def _can_lose_deadline(request: Request) -> bool:
    """Whether it has a deadline, and has not begun: a preempted one keeps its rank, on which its protection rests."""
    return request.arrival.deadline_s is not None and not request.num_paid_tokens and not request.has_lost_deadline


def make_waiting_queue(policy: SchedulingPolicy, quantum: int) -> WaitingQueue:
    """The queue that a policy needs."""
    if isinstance(policy, DeadlinePolicy):
        return DeadlineQueue(quantum)
    return FairQueue(quantum) if isinstance(policy, FairPolicy) else WaitingQueue(quantum)
