"""Fair queueing: tenants take turns by a deficit round robin, in tokens.

`tenant_turns` gives the turns. So while two tenants both have requests waiting, the tokens that they are admitted with
differ by at most one quantum and one request.

A request is charged its tokens that are to be computed, and at most `quantum` tokens of output. When it has ended, the
difference to what it has generated is settled. A preempted request is charged once, and goes before other tenants.

Within a tenant requests go by rank. With a single tenant the order is that of the ranks alone, whatever the debts.

Where places are short, tenants that have less than their share of them go first; `place_shares` defines the share.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import nlargest
from operator import attrgetter, itemgetter

from llmstack_core_scheduler.request import Rank, Request
from llmstack_core_scheduler.tenant_turns import Tenant, TenantTurns
from llmstack_core_scheduler.waiting_queue import MAX_NUM_SKIPPED, WaitingQueue, WaitingTenants

MAX_NUM_TENANTS = 256
"""Tenants whose first requests others may overtake in one step, where more than `MAX_NUM_SKIPPED` have some."""
MAX_NUM_REPORTED = 64
"""Tenants in the statistics of a step: those with the most tokens."""

_rank_of = attrgetter("rank")


class FairQueue(WaitingQueue):
    """Waiting requests, admitted in fair shares of tokens."""

    __slots__ = ("_begun", "_turns")

    def __init__(self, quantum: int) -> None:
        super().__init__(quantum)
        self._turns: TenantTurns[Request] = TenantTurns(quantum)
        self._begun: list[Request] = []  # preempted ones, by rank

    def update_tenants(self) -> WaitingTenants:
        """Computes `tenants`: once per step at most, not with each change."""
        waiting = [(tenant.name, tenant.num_tokens) for _, _, tenant in self._turns.turns]
        largest = nlargest(MAX_NUM_REPORTED, waiting, itemgetter(1))
        self.tenants = WaitingTenants(tuple([name for name, _ in largest]), tuple([n for _, n in largest]))
        return self.tenants

    def deficit_of(self, tenant: str) -> int:
        """Tokens that the tenant may still be admitted with in this round; negative where it has debts."""
        found = self._turns.tenants.get(tenant)
        return 0 if found is None else found.deficit

    def add(self, request: Request) -> None:
        """Puts the request where its rank belongs among those of its tenant."""
        super().add(request)
        tenant = self._turns.tenant(request.arrival.tenant)
        self._turns.will_wait(tenant)
        insort(tenant.waiting, request, key=_rank_of)
        if request.num_paid_tokens:
            insort(self._begun, request, key=_rank_of)
            tenant.num_paused += 1
        self._note_change(tenant, request.num_queued_tokens)

    def remove(self, request: Request) -> None:
        """Takes out a request that leaves the queue, admitted or not."""
        super().remove(request)
        tenant = self._turns.tenants[request.arrival.tenant]
        del tenant.waiting[bisect_left(tenant.waiting, request.rank, key=_rank_of)]
        if request.num_paid_tokens:
            del self._begun[bisect_left(self._begun, request.rank, key=_rank_of)]
            tenant.num_paused -= 1
        self._note_change(tenant, -request.num_queued_tokens)

    def admit(self, request: Request, num_computed_tokens: int) -> None:
        """Takes out a request that begins to run, and charges its tenant."""
        tenant = self._turns.tenants[request.arrival.tenant]
        num_paid_tokens = request.num_paid_tokens
        if not num_paid_tokens:
            self._turns.take_turn(tenant)
            num_paid_tokens = self._charge(tenant, request, num_computed_tokens)
        super().admit(request, num_computed_tokens)
        request.num_paid_tokens = num_paid_tokens

    def join(self, request: Request, num_computed_tokens: int) -> None:
        """Charges the tenant of a request that begins to run without having waited."""
        tenant = self._turns.tenant(request.arrival.tenant)
        request.num_paid_tokens = self._charge(tenant, request, num_computed_tokens)
        self._note_change(tenant, 0)

    def finish(self, request: Request) -> None:
        """Settles what the request was charged for and has not generated, or the other way round."""
        if request.num_paid_tokens:
            self._turns.settle(request.arrival.tenant, request.num_paid_tokens - len(request.token_ids))
            self.tenants = None

    def order(self, now_s: float = 0.0, share: int = 0) -> FairOrder:
        """The order in which requests are admitted in the step that begins at `now_s`."""
        return FairOrder(self._begun, self._turns, share)

    def share_of_places(self, num_places: int) -> int:
        """The places of each tenant that has requests; 0 with a single one, which is not limited. O(1)."""
        num_tenants = len(self._turns.tenants)
        return max(num_places // num_tenants, 1) if num_tenants > 1 else 0

    def num_running_of(self, tenant: str) -> int:
        """The requests of a tenant that run."""
        found = self._turns.tenants.get(tenant)
        return 0 if found is None else found.num_running

    def change_rank(self, request: Request, rank: Rank) -> None:
        """Moves a waiting request within its tenant, which no share of any tenant depends on."""
        requests = self._turns.tenants[request.arrival.tenant].waiting
        for queue in (self.requests, requests):
            del queue[bisect_left(queue, request.rank, key=_rank_of)]
        request.rank = rank
        for queue in (self.requests, requests):
            insort(queue, request, key=_rank_of)

    def _charge(self, tenant: Tenant[Request], request: Request, num_computed_tokens: int) -> int:
        num_tokens = self.num_tokens_to_pay(request)
        self._turns.charge(tenant, num_tokens - num_computed_tokens)
        return num_tokens

    def _note_change(self, tenant: Tenant[Request], num_new_tokens: int) -> None:
        self._turns.note_change(tenant, num_new_tokens)
        self.tenants = None


class FairOrder:
    """The requests of a fair queue in turn, while some of them are admitted.

    With a `share` of places those of tenants that have less go first. Each tenant has an equal part of what may be
    skipped, and at least its first request, so that requests that wait for something do not hold up other tenants.
    """

    __slots__ = (
        "_begun",
        "_first_turn",
        "_max_in_all",
        "_max_num_skipped",
        "_name_to_num_skipped",
        "_num_skipped",
        "_share",
        "_turns",
    )

    def __init__(self, begun: list[Request], turns: TenantTurns[Request], share: int = 0) -> None:
        self._begun = begun
        self._turns = turns
        self._share = share
        self._name_to_num_skipped: dict[str, int] = {}
        self._num_skipped = self._first_turn = 0  # the turns before this one have nothing more to admit
        num_tenants = max(len(turns.turns), 1)
        self._max_num_skipped = MAX_NUM_SKIPPED // num_tenants  # of a tenant, besides its first one
        self._max_in_all = max(MAX_NUM_SKIPPED, min(num_tenants, MAX_NUM_TENANTS))

    def next(self) -> Request | None:
        """A preempted request that is the first of its tenant, or else the first request of the tenant in turn."""
        if self._num_skipped > self._max_in_all:
            return None
        if not self._share:
            return next(self._firsts(), None)
        best = None
        for request in self._firsts():
            if self._turns.tenants[request.arrival.tenant].num_running < self._share:
                return request
            best = best or request
        return best

    def _firsts(self) -> Iterator[Request]:
        for request in self._begun:
            if self._first(self._turns.tenants[request.arrival.tenant]) is request:
                yield request
        turns, is_leading = self._turns.turns, True
        for index in range(self._first_turn, len(turns)):
            first = self._first(turns[index][2])
            if first is not None:
                is_leading = False
                yield first
            elif is_leading:
                self._first_turn = index + 1

    def skip(self, request: Request) -> None:
        """Lets others overtake the request in this step."""
        name = request.arrival.tenant
        self._name_to_num_skipped[name] = self._name_to_num_skipped.get(name, 0) + 1
        self._num_skipped += 1

    def _first(self, tenant: Tenant[Request]) -> Request | None:
        index = self._name_to_num_skipped.get(tenant.name, 0) if self._num_skipped else 0
        return tenant.waiting[index] if index <= self._max_num_skipped and index < len(tenant.waiting) else None
