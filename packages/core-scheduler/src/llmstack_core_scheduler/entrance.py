"""The ways in which a waiting request comes by its blocks: from the prefix cache, from the host, or from its parent."""

from __future__ import annotations

from typing import Protocol

from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_types import RequestStatus


class Entrance(Protocol):
    """One way in, found but not yet taken.

    Attributes:
        num_computed_tokens: Tokens that need not be computed.
        num_needed_blocks: Free blocks that all of the request's tokens need.
    """

    num_computed_tokens: int
    num_needed_blocks: int

    def take(self, num_tokens: int, plan: StepPlan) -> list[int] | None:
        """The request's whole table, with room for `num_tokens`; None, with nothing changed, if there is none."""
        ...


def find_entrance(request: Request, manager: KVCacheManager, plan: StepPlan) -> Entrance:
    """The way in for a request that waits."""
    if request.status is RequestStatus.SWAPPED:
        return _FromHost(request, manager)
    if request.parent is not None and not request.needs_whole_prompt:
        num_shared_tokens = num_tokens_to_share(request, request.parent, manager.block_size, plan)
        if num_shared_tokens:
            return _FromParent(request, request.parent, num_shared_tokens, manager)
    return _FromPrefixCache(request, manager)


def num_tokens_to_share(request: Request, parent: Request, block_size: int, plan: StepPlan) -> int:
    """How many tokens of the parent's prompt are there to be shared, at most all but the last."""
    if parent.status is not RequestStatus.RUNNING:
        return 0
    num_tokens = request.num_prompt_tokens - 1
    if plan.num_tokens_before(parent) >= num_tokens:
        return num_tokens
    # What this very step computes cannot be copied before it, but full blocks can be read after they are written.
    return min(num_tokens, parent.num_computed_tokens) // block_size * block_size


class _FromPrefixCache:
    def __init__(self, request: Request, manager: KVCacheManager) -> None:
        self._request, self._manager = request, manager
        self._block_ids: list[int] = []
        self.num_computed_tokens = 0
        if not request.needs_whole_prompt:
            self._block_ids, self.num_computed_tokens = manager.get_computed_blocks(
                request.request_id, request.token_ids, request.arrival.cache_salt
            )
        self.num_needed_blocks = -(-(request.num_tokens - self.num_computed_tokens) // manager.block_size)

    def take(self, num_tokens: int, plan: StepPlan) -> list[int] | None:
        request = self._request
        return self._manager.allocate_slots(request.request_id, num_tokens, self._block_ids, request.arrival.cache_salt)


class _FromHost:
    def __init__(self, request: Request, manager: KVCacheManager) -> None:
        self._request_id, self._manager = request.request_id, manager
        self.num_computed_tokens = request.num_computed_tokens
        self.num_needed_blocks = -(-request.num_tokens // manager.block_size)

    def take(self, num_tokens: int, plan: StepPlan) -> list[int] | None:
        if plan.block_copies:
            return None  # the source of such a copy may be free by now, and swap-ins come before it
        swap_ins = self._manager.swap_in(self._request_id)
        if swap_ins is None:
            return None
        # All needed blocks were free, the table's among them, so the rest of them still is.
        self._manager.allocate_slots(self._request_id, num_tokens)
        plan.swap_ins += swap_ins
        return self._manager.block_table(self._request_id)


class _FromParent:
    def __init__(self, request: Request, parent: Request, num_tokens: int, manager: KVCacheManager) -> None:
        self._request_id, self._parent_id, self._manager = request.request_id, parent.request_id, manager
        self.num_computed_tokens = num_tokens
        block_size = manager.block_size
        self.num_needed_blocks = -(-request.num_tokens // block_size) - num_tokens // block_size

    def take(self, num_tokens: int, plan: StepPlan) -> list[int] | None:
        block_copies = self._manager.fork(self._parent_id, self._request_id, self.num_computed_tokens)
        if block_copies is None:
            return None
        if self._manager.allocate_slots(self._request_id, num_tokens) is None:
            self._manager.free(self._request_id)
            return None
        plan.block_copies += block_copies
        plan.num_forks += 1
        return self._manager.block_table(self._request_id)
