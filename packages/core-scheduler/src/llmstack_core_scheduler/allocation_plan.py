"""Plans for the blocks of a waiting request: prefix cache, host or parent."""

from __future__ import annotations

from typing import Protocol

from llmstack_core_scheduler.block_needs import BlockNeeds
from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.prompt_turns import goes_before_long
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_types import RequestStatus


class AllocationPlan(Protocol):
    """One way to allocate a request's blocks, which has not been carried out.

    Attributes:
        num_computed_tokens: Tokens that need not be computed.
        num_needed_blocks: Free blocks that all of the request's tokens need.
        num_held_tokens: Tokens whose KV lies in blocks that others wrote; with states they may be more than computed.
    """

    num_computed_tokens: int
    num_needed_blocks: int
    num_held_tokens: int

    def allocate(self, num_tokens: int, plan: StepPlan) -> list[int] | None:
        """The request's whole table, with room for `num_tokens`; None, with nothing changed, if there is none."""
        ...


def waits_for_progress(request: Request, plan: StepPlan, config: SchedulerConfig) -> bool:
    """Whether a waiting request waits for the progress of running ones, not for room: then others may overtake it."""
    if request.num_tokens > len(request.token_ids) or request.num_computed_tokens == request.num_tokens:
        return True  # preempted while a step under way samples for it, in the second case its last token
    if plan.long_prompts and not goes_before_long(request, plan):
        return True
    parent, limit = request.parent, config.max_num_partial_prefills
    if parent is not None and parent.status is RequestStatus.RUNNING:
        if parent.num_computed_tokens < request.num_prompt_tokens - 1:
            return True  # what it will share is being computed
    elif limit and plan.num_partial_rows >= limit:
        num_tokens = request.num_tokens - request.num_computed_tokens
        return num_tokens > min(plan.budget, config.max_num_row_tokens)
    return False


def plan_allocation(request: Request, manager: KVCacheManager, needs: BlockNeeds, plan: StepPlan) -> AllocationPlan:
    """Chooses how a waiting request gets its blocks."""
    if request.status is RequestStatus.SWAPPED:
        return _FromHost(request, manager, needs)
    if request.parent is not None and not request.needs_whole_prompt:
        num_shared_tokens = num_tokens_to_share(request, request.parent, manager, plan)
        if num_shared_tokens:
            return _FromParent(request, request.parent, num_shared_tokens, manager, needs)
    return _FromPrefixCache(request, manager, needs)


def num_tokens_to_share(request: Request, parent: Request, manager: KVCacheManager, plan: StepPlan) -> int:
    """Tokens of the parent's prompt that the request can share, at most all but the last."""
    if parent.status is not RequestStatus.RUNNING:
        return 0
    num_tokens = request.num_prompt_tokens - 1
    if plan.num_tokens_before(parent) < num_tokens:
        # What this very step computes cannot be copied before it, but full blocks can be read after they are written.
        num_tokens = min(num_tokens, parent.num_computed_tokens) // manager.block_size * manager.block_size
    return num_tokens if manager.keeps_prefix(parent.request_id, num_tokens) else 0


class _FromPrefixCache:
    def __init__(self, request: Request, manager: KVCacheManager, needs: BlockNeeds) -> None:
        self._request, self._manager = request, manager
        self._block_ids: list[int] = []
        self.num_computed_tokens = 0
        if not request.needs_whole_prompt:
            self._block_ids, self.num_computed_tokens = manager.get_computed_blocks(
                request.request_id, request.keys, request.prefix_salt
            )
            request.num_known_tokens = manager.num_known_tokens
        self.num_held_tokens = needs.num_slots(self._block_ids)
        self.num_needed_blocks = needs.to_admit(request, self.num_computed_tokens, self.num_held_tokens)

    def allocate(self, num_tokens: int, plan: StepPlan) -> list[int] | None:
        request = self._request
        return self._manager.allocate_slots(request.request_id, num_tokens, self._block_ids, request.prefix_salt)


class _FromHost:
    num_held_tokens = 0  # the copies are its own

    def __init__(self, request: Request, manager: KVCacheManager, needs: BlockNeeds) -> None:
        self._request_id, self._manager = request.request_id, manager
        self.num_computed_tokens = request.num_computed_tokens
        self.num_needed_blocks = needs.to_admit(request, self.num_computed_tokens, num_found_tokens=0)

    def allocate(self, num_tokens: int, plan: StepPlan) -> list[int] | None:
        if plan.block_copies:
            return None  # the source of such a copy may be free by now, and swap-ins come before it
        swap_ins = self._manager.swap_in(self._request_id)
        if swap_ins is None:
            return None
        if self._manager.has_windows:
            # It was swapped out while a step was under way, and may hold what its windows have passed in that step.
            self._manager.advance(self._request_id, self.num_computed_tokens)
        # All needed blocks were free, the table's among them, so the rest of them still is.
        self._manager.allocate_slots(self._request_id, num_tokens)
        plan.swap_ins += swap_ins
        return self._manager.block_table(self._request_id)


class _FromParent:
    num_held_tokens = 0  # its first row goes on behind them

    def __init__(
        self, request: Request, parent: Request, num_tokens: int, manager: KVCacheManager, needs: BlockNeeds
    ) -> None:
        self._request_id, self._parent_id, self._manager = request.request_id, parent.request_id, manager
        self.num_computed_tokens = num_tokens
        num_full_tokens = num_tokens // manager.block_size * manager.block_size
        self.num_needed_blocks = needs.to_admit(request, num_tokens, num_full_tokens)

    def allocate(self, num_tokens: int, plan: StepPlan) -> list[int] | None:
        block_copies = self._manager.fork(self._parent_id, self._request_id, self.num_computed_tokens)
        if block_copies is None:
            return None
        if self._manager.allocate_slots(self._request_id, num_tokens) is None:
            self._manager.free(self._request_id)
            return None
        plan.block_copies += block_copies
        plan.num_forks += 1
        return self._manager.block_table(self._request_id)
