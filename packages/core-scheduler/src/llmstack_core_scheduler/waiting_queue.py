"""Waiting requests, in the order in which they are admitted: by rank."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.request_queue import RequestQueue

MAX_NUM_SKIPPED = 64
"""Waiting requests that others may overtake in one step; it bounds the time of a step, whatever the queue."""


class AdmissionOrder(Protocol):
    """The requests of a queue one after the other, while some of them are admitted. Used within one step."""

    def next(self) -> Request | None:
        """The request to admit next, the same until it is admitted or skipped; None where no other one may follow."""
        ...

    def skip(self, request: Request) -> None:
        """Lets others overtake the request in this step."""
        ...


class WaitingTenants(NamedTuple):
    """Tenants with waiting requests, and the tokens of these."""

    names: tuple[str, ...] = ()
    num_tokens: tuple[int, ...] = ()


class WaitingQueue(RequestQueue):
    """Requests that wait for their blocks, admitted by rank. It counts their tokens too.

    A request counts with its prompt and at most `quantum` tokens of output: `max_tokens` is often far more than what is
    generated.

    Attributes:
        num_tokens: Tokens of the requests in the queue.
        num_prefill_tokens: The tokens of waiting requests that must be computed, if no prefix is found.
        num_admitted_tokens: Counter of the tokens of those that were admitted.
        tenants: The tenants of the requests, those with the most tokens first; empty where they do not matter, and None
            until `update_tenants` where requests have changed.
    """

    __slots__ = ("num_admitted_tokens", "num_prefill_tokens", "num_tokens", "quantum", "tenants")

    def __init__(self, quantum: int) -> None:
        super().__init__()
        self.quantum = quantum
        self.num_tokens = 0
        self.num_prefill_tokens = 0
        self.num_admitted_tokens = 0
        self.tenants: WaitingTenants | None = WaitingTenants()

    def update_tenants(self) -> WaitingTenants:
        """Computes `tenants` after requests have changed."""
        self.tenants = WaitingTenants()
        return self.tenants

    def add(self, request: Request) -> None:
        """Puts the request where its rank belongs."""
        super().add(request)
        request.num_queued_tokens = self.num_tokens_to_pay(request)
        self.num_tokens += request.num_queued_tokens
        request.num_queued_prefill_tokens = len(request.token_ids) - request.num_computed_tokens
        self.num_prefill_tokens += request.num_queued_prefill_tokens

    def remove(self, request: Request) -> None:
        """Takes out a request that leaves the queue, admitted or not."""
        super().remove(request)
        self.num_tokens -= request.num_queued_tokens
        self.num_prefill_tokens -= request.num_queued_prefill_tokens

    def admit(self, request: Request, num_computed_tokens: int) -> None:
        """Takes out a request that begins to run; `num_computed_tokens` of its tokens need not be computed."""
        self.remove(request)
        self.num_admitted_tokens += request.num_queued_tokens

    def join(self, request: Request, num_computed_tokens: int) -> None:
        """Notes a request that begins to run without having waited."""

    def finish(self, request: Request) -> None:
        """Notes that a request has ended; it is not in the queue."""

    def order(self, now_s: float = 0.0, share: int = 0) -> AdmissionOrder:
        """The order in which requests are admitted in the step that begins at `now_s`.

        `share`: Where places are short, the share of each tenant: those below it go first. 0 where they are not.
        """
        return _ByRank(self.requests)

    def share_of_places(self, num_places: int) -> int:
        """The places of each tenant that has requests, if there are several and the policy shares places; else 0."""
        return 0

    def num_running_of(self, tenant: str) -> int:
        """The requests of a tenant that run, where the policy shares places."""
        return 0

    def num_tokens_to_pay(self, request: Request) -> int:
        """Tokens that a request counts with: those it has, and at most `quantum` further ones."""
        num_tokens = len(request.token_ids)
        return num_tokens + min(request.max_num_tokens - num_tokens, self.quantum)


class _ByRank:
    __slots__ = ("_num_skipped", "_requests")

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self._num_skipped = 0

    def next(self) -> Request | None:
        index = self._num_skipped
        return self._requests[index] if index <= MAX_NUM_SKIPPED and index < len(self._requests) else None

    def skip(self, request: Request) -> None:
        self._num_skipped += 1
