"""Adds draft tokens to the rows of a step, as far as budget and blocks are left over."""

from __future__ import annotations

from llmstack_core_scheduler.protocols import DraftSource, KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.step_plan import StepPlan


class Drafting:
    """Asks a source for drafts and finds them slots. Drafts take what nobody else wants: no request waits for them.

    Attributes:
        num_draft_tokens: Counter of drafts that were scheduled.
        num_accepted_draft_tokens: Counter of those that were right.
    """

    def __init__(self, source: DraftSource, num_lookahead_slots: int, manager: KVCacheManager) -> None:
        """`num_lookahead_slots` is the most drafts of one row."""
        self.num_draft_tokens = 0
        self.num_accepted_draft_tokens = 0
        self._source = source
        self._num_lookahead_slots = num_lookahead_slots
        self._manager = manager

    def extend(self, plan: StepPlan) -> None:
        """Adds drafts to the rows that sample, first come first served."""
        for index, request in enumerate(plan.requests):
            if not plan.budget:
                return
            draft_token_ids = self._propose(request, plan.budget)
            if not draft_token_ids:
                continue
            new_block_ids = self._make_room(request, len(draft_token_ids))
            if new_block_ids is not None:
                plan.add_drafts(index, draft_token_ids, new_block_ids)
                self.num_draft_tokens += len(draft_token_ids)

    def settle(self, request: Request, num_sampled_tokens: int, is_stale: bool) -> None:
        """Takes the slots of the rejected drafts back: the request's next tokens are computed into them.

        `is_stale` says that the request's blocks have gone since.
        """
        self.num_accepted_draft_tokens += num_sampled_tokens - 1
        request.num_tokens = len(request.token_ids)
        if not is_stale:
            request.num_computed_tokens = request.num_tokens - 1

    def _propose(self, request: Request, budget: int) -> list[int]:
        num_tokens = request.num_computed_tokens
        if num_tokens != len(request.token_ids) or request.num_tokens == num_tokens:
            return []  # it samples nothing, or its last token, or what it begins with is not known yet
        # The row's own token follows the drafts, so one less than may still come; the last token needs no slot.
        limit = min(self._num_lookahead_slots, budget, request.max_num_tokens - num_tokens - 1)
        if limit < 1:
            return []
        return list(self._source.propose(request.request_id, request.token_ids, limit))[:limit]

    def _make_room(self, request: Request, num_draft_tokens: int) -> list[int] | None:
        num_tokens = request.num_computed_tokens + num_draft_tokens
        if num_tokens <= request.num_slots:
            return []
        new_block_ids = self._manager.allocate_slots(request.request_id, num_tokens)
        if new_block_ids is not None:
            request.num_slots += len(new_block_ids) * self._manager.block_size
        return new_block_ids
