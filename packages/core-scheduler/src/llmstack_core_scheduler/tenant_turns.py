"""A deficit round robin over tenants, in tokens, for work of any kind.

Tenants with waiting work take turns. Each round gives a tenant `quantum` tokens. Its work begins while it has tokens
left, and what the last piece takes beyond them is a debt, which later rounds pay. So while two tenants both have work
waiting, the tokens that they have begun differ by at most one quantum and one piece.

A tenant is forgotten with its last piece of work, and so are its debts. One that comes new is placed behind all that
have a turn in the next round; so no tenant waits for ever, however many new ones there are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import itemgetter
from typing import Generic, TypeVar

Work = TypeVar("Work")


class Tenant(Generic[Work]):
    """The state of one tenant that has work.

    Attributes:
        number: The place of its turn within a round.
        waiting: Its waiting work, the piece that begins first at the front.
        num_tokens: Tokens of these.
        num_begun: Its work that was begun and has not ended.
        num_paused: That among it which waits again.
        deficit: Tokens that it may still begin; at most 0 while it has to wait for a later round.
        round: The last round whose quantum is part of that.
        turn: Round and number of its next turn; None while no work of it waits.
    """

    __slots__ = ("deficit", "name", "num_begun", "num_paused", "num_tokens", "number", "round", "turn", "waiting")

    def __init__(self, name: str, number: int, round_: int) -> None:
        self.name = name
        self.number = number
        self.waiting: list[Work] = []
        self.num_tokens = 0
        self.num_begun = self.num_paused = 0
        self.deficit = 0
        self.round = round_
        self.turn: tuple[int, int] | None = None

    @property
    def num_running(self) -> int:
        """Its work that was begun and does not wait."""
        return self.num_begun - self.num_paused


class TenantTurns(Generic[Work]):
    """The turns of tenants. What waits in `Tenant.waiting` is changed by the caller, who calls `note_change` then.

    Attributes:
        tenants: Name to each tenant that has work.
        turns: Round, number and tenant of each turn, in order.
        round: The last round that has begun.
        num_tenants: Counter of the tenants that came new.
    """

    __slots__ = ("num_tenants", "quantum", "round", "tenants", "turns")

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self.tenants: dict[str, Tenant[Work]] = {}
        self.turns: list[tuple[int, int, Tenant[Work]]] = []
        self.round = 0
        self.num_tenants = 0

    def tenant(self, name: str) -> Tenant[Work]:
        """The tenant of this name, which may come new."""
        tenant = self.tenants.get(name)
        if tenant is None:
            self.num_tenants += 1
            tenant = self.tenants[name] = Tenant(name, self.num_tenants, self.round)
        return tenant

    def will_wait(self, tenant: Tenant[Work]) -> None:
        """To be called before work of the tenant begins to wait."""
        if not tenant.waiting:
            # While none waited, the rounds paid its debts, but it saved nothing.
            tenant.deficit = min(0, tenant.deficit + self.quantum * (self.round - tenant.round))
            tenant.round = self.round

    def take_turn(self, tenant: Tenant[Work]) -> None:
        """Gives the tenant the quanta of the rounds up to its turn, and begins that round."""
        round_ = tenant.round if tenant.turn is None else tenant.turn[0]
        tenant.deficit += self.quantum * (round_ - tenant.round)
        tenant.round = round_
        self.round = max(self.round, round_)

    def charge(self, tenant: Tenant[Work], num_tokens: int) -> None:
        """Charges the tenant for work that begins."""
        tenant.deficit -= num_tokens
        tenant.num_begun += 1

    def settle(self, name: str, num_unspent_tokens: int) -> None:
        """Ends work that was begun, and gives back what it was charged for and has not cost."""
        tenant = self.tenants.get(name)
        if tenant is not None:
            tenant.num_begun -= 1
            tenant.deficit += num_unspent_tokens
            self.note_change(tenant, 0)

    def note_change(self, tenant: Tenant[Work], num_new_tokens: int) -> None:
        """Gives the tenant the turn that follows from its state; one without work is forgotten."""
        tenant.num_tokens += num_new_tokens
        if tenant.turn is not None:
            del self.turns[bisect_left(self.turns, tenant.turn, key=itemgetter(0, 1))]
            tenant.turn = None
        if tenant.waiting:
            # Rounds until it has tokens: the first that makes a deficit of at most 0 positive.
            num_rounds = 0 if tenant.deficit > 0 else (self.quantum - tenant.deficit) // self.quantum
            tenant.turn = (tenant.round + num_rounds, tenant.number)
            insort(self.turns, (*tenant.turn, tenant), key=itemgetter(0, 1))
            return
        tenant.deficit = min(tenant.deficit, 0)
        if not tenant.num_begun:
            del self.tenants[tenant.name]
