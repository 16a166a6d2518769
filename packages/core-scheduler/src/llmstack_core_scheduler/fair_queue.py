"""Fair queueing: a deficit round robin over tenants, in tokens.

Tenants with waiting requests take turns. Each round gives a tenant `quantum` tokens. Its requests are admitted while it
has tokens left, and what the last one takes beyond them is a debt, which later rounds pay. So while two tenants both
have requests waiting, the tokens that they are admitted with differ by at most one quantum and one request.

A request is charged its tokens that are to be computed, and at most `quantum` tokens of output. When it has ended, the
difference to what it has generated is settled. A preempted request is charged once, and goes before other tenants.

Within a tenant requests go by rank. With a single tenant the order is that of the ranks alone, whatever the debts.

Where places are short, tenants that have less than their share of them go first; `place_shares` defines the share.

A tenant is forgotten with its last request, and so are its debts. One that comes new is placed behind all that have a
turn in the next round; so no tenant waits for ever, however many new ones there are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import nlargest
from operator import attrgetter, itemgetter

from llmstack_core_scheduler.request import Rank, Request
from llmstack_core_scheduler.waiting_queue import MAX_NUM_SKIPPED, WaitingQueue, WaitingTenants

MAX_NUM_REPORTED = 64
"""Tenants in the statistics of a step: those with the most tokens."""

_rank_of = attrgetter("rank")


class _Tenant:
    """The state of one tenant that has a request.

    Attributes:
        number: The place of its turn within a round.
        requests: Its waiting requests by rank.
        num_tokens: Tokens of these.
        num_begun: Its requests that were admitted and have not ended.
        num_paused: Those among these that wait again, preempted.
        deficit: Tokens that it may still be admitted with; at most 0 while it has to wait for a later round.
        round: The last round whose quantum is part of that.
        turn: Round and number of its next turn; None while no request of it waits.
    """

    __slots__ = ("deficit", "name", "num_begun", "num_paused", "num_tokens", "number", "requests", "round", "turn")

    def __init__(self, name: str, number: int, round_: int) -> None:
        self.name = name
        self.number = number
        self.requests: list[Request] = []
        self.num_tokens = 0
        self.num_begun = self.num_paused = 0
        self.deficit = 0
        self.round = round_
        self.turn: tuple[int, int] | None = None

    @property
    def num_running(self) -> int:
        """Its requests that have a place."""
        return self.num_begun - self.num_paused


class FairQueue(WaitingQueue):
    """Waiting requests, admitted in fair shares of tokens."""

    __slots__ = ("_begun", "_num_tenants", "_round", "_tenants", "_turns")

    def __init__(self, quantum: int) -> None:
        super().__init__(quantum)
        self._tenants: dict[str, _Tenant] = {}
        self._turns: list[tuple[int, int, _Tenant]] = []
        self._begun: list[Request] = []  # preempted ones, by rank
        self._round = 0
        self._num_tenants = 0

    def update_tenants(self) -> WaitingTenants:
        """Computes `tenants`: once per step at most, not with each change."""
        waiting = [(tenant.name, tenant.num_tokens) for _, _, tenant in self._turns]
        largest = nlargest(MAX_NUM_REPORTED, waiting, itemgetter(1))
        self.tenants = WaitingTenants(tuple([name for name, _ in largest]), tuple([n for _, n in largest]))
        return self.tenants

    def deficit_of(self, tenant: str) -> int:
        """Tokens that the tenant may still be admitted with in this round; negative where it has debts."""
        found = self._tenants.get(tenant)
        return 0 if found is None else found.deficit

    def add(self, request: Request) -> None:
        """Puts the request where its rank belongs among those of its tenant."""
        super().add(request)
        tenant = self._tenant_of(request)
        if not tenant.requests:
            # While none waited, the rounds paid its debts, but it saved nothing.
            tenant.deficit = min(0, tenant.deficit + self.quantum * (self._round - tenant.round))
            tenant.round = self._round
        insort(tenant.requests, request, key=_rank_of)
        if request.num_paid_tokens:
            insort(self._begun, request, key=_rank_of)
            tenant.num_paused += 1
        self._note_change(tenant, request.num_queued_tokens)

    def remove(self, request: Request) -> None:
        """Takes out a request that leaves the queue, admitted or not."""
        super().remove(request)
        tenant = self._tenants[request.arrival.tenant]
        del tenant.requests[bisect_left(tenant.requests, request.rank, key=_rank_of)]
        if request.num_paid_tokens:
            del self._begun[bisect_left(self._begun, request.rank, key=_rank_of)]
            tenant.num_paused -= 1
        self._note_change(tenant, -request.num_queued_tokens)

    def admit(self, request: Request, num_computed_tokens: int) -> None:
        """Takes out a request that begins to run, and charges its tenant."""
        tenant = self._tenants[request.arrival.tenant]
        num_paid_tokens = request.num_paid_tokens
        if not num_paid_tokens:
            self._take_turn(tenant)
            num_paid_tokens = self._charge(tenant, request, num_computed_tokens)
        super().admit(request, num_computed_tokens)
        request.num_paid_tokens = num_paid_tokens

    def join(self, request: Request, num_computed_tokens: int) -> None:
        """Charges the tenant of a request that begins to run without having waited."""
        tenant = self._tenant_of(request)
        request.num_paid_tokens = self._charge(tenant, request, num_computed_tokens)
        self._note_change(tenant, 0)

    def finish(self, request: Request) -> None:
        """Settles what the request was charged for and has not generated, or the other way round."""
        self.settle(request, len(request.token_ids))

    def settle(self, request: Request, num_tokens: int) -> None:
        """Ends a request that has cost so many tokens."""
        tenant = self._tenants.get(request.arrival.tenant)
        if tenant is not None and request.num_paid_tokens:
            tenant.num_begun -= 1
            tenant.deficit += request.num_paid_tokens - num_tokens
            self._note_change(tenant, 0)

    def order(self, now_s: float = 0.0, share: int = 0) -> FairOrder:
        """The order in which requests are admitted in the step that begins at `now_s`."""
        return FairOrder(self._begun, self._turns, self._tenants, share)

    def share_of_places(self, num_places: int) -> int:
        """The places of each tenant that has requests; 0 with a single one, which is not limited. O(1)."""
        num_tenants = len(self._tenants)
        return max(num_places // num_tenants, 1) if num_tenants > 1 else 0

    def num_running_of(self, tenant: str) -> int:
        """The requests of a tenant that run."""
        found = self._tenants.get(tenant)
        return 0 if found is None else found.num_running

    def change_rank(self, request: Request, rank: Rank) -> None:
        """Moves a waiting request within its tenant, which no share of any tenant depends on."""
        requests = self._tenants[request.arrival.tenant].requests
        for queue in (self.requests, requests):
            del queue[bisect_left(queue, request.rank, key=_rank_of)]
        request.rank = rank
        for queue in (self.requests, requests):
            insort(queue, request, key=_rank_of)

    def _tenant_of(self, request: Request) -> _Tenant:
        name = request.arrival.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_tenants += 1
            tenant = self._tenants[name] = _Tenant(name, self._num_tenants, self._round)
        return tenant

    def _take_turn(self, tenant: _Tenant) -> None:
        """Gives the tenant the quanta of the rounds up to its turn, and begins that round."""
        round_ = tenant.round if tenant.turn is None else tenant.turn[0]
        tenant.deficit += self.quantum * (round_ - tenant.round)
        tenant.round = round_
        self._round = max(self._round, round_)

    def _charge(self, tenant: _Tenant, request: Request, num_computed_tokens: int) -> int:
        num_tokens = self.num_tokens_to_pay(request)
        tenant.deficit -= num_tokens - num_computed_tokens
        tenant.num_begun += 1
        return num_tokens

    def _note_change(self, tenant: _Tenant, num_new_tokens: int) -> None:
        """Gives the tenant the turn that follows from its state; one without requests is forgotten."""
        tenant.num_tokens += num_new_tokens
        self.tenants = None
        if tenant.turn is not None:
            del self._turns[bisect_left(self._turns, tenant.turn, key=itemgetter(0, 1))]
            tenant.turn = None
        if tenant.requests:
            # Rounds until it has tokens: the first that makes a deficit of at most 0 positive.
            num_rounds = 0 if tenant.deficit > 0 else (self.quantum - tenant.deficit) // self.quantum
            tenant.turn = (tenant.round + num_rounds, tenant.number)
            insort(self._turns, (*tenant.turn, tenant), key=itemgetter(0, 1))
            return
        tenant.deficit = min(tenant.deficit, 0)
        if not tenant.num_begun:
            del self._tenants[tenant.name]


class FairOrder:
    """The requests of a fair queue in turn, while some of them are admitted.

    With a `share` of places those of tenants that have less go first.
    """

    __slots__ = ("_begun", "_name_to_num_skipped", "_num_skipped", "_share", "_tenants", "_turns")

    def __init__(
        self, begun: list[Request], turns: list[tuple[int, int, _Tenant]], tenants: dict[str, _Tenant], share: int = 0
    ) -> None:
        self._begun = begun
        self._turns = turns
        self._tenants = tenants
        self._share = share
        self._name_to_num_skipped: dict[str, int] = {}
        self._num_skipped = 0

    def next(self) -> Request | None:
        """A preempted request that is the first of its tenant, or else the first request of the tenant in turn."""
        if self._num_skipped > MAX_NUM_SKIPPED:
            return None
        if not self._share:
            return next(self._firsts(), None)
        best = None
        for request in self._firsts():
            if self._tenants[request.arrival.tenant].num_running < self._share:
                return request
            best = best or request
        return best

    def _firsts(self) -> Iterator[Request]:
        for request in self._begun:
            if self._first(self._tenants[request.arrival.tenant]) is request:
                yield request
        for _, _, tenant in self._turns:
            first = self._first(tenant)
            if first is not None:
                yield first

    def skip(self, request: Request) -> None:
        """Lets others overtake the request in this step."""
        name = request.arrival.tenant
        self._name_to_num_skipped[name] = self._name_to_num_skipped.get(name, 0) + 1
        self._num_skipped += 1

    def _first(self, tenant: _Tenant) -> Request | None:
        index = self._name_to_num_skipped.get(tenant.name, 0) if self._num_skipped else 0
        return tenant.requests[index] if index < len(tenant.requests) else None
