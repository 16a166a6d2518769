"""Draft tokens of a step, within the budget and the blocks that remain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.draft_lengths import DraftLengths
from llmstack_core_scheduler.model_drafts import ModelDrafts
from llmstack_core_scheduler.ngram_drafts import NgramDrafts
from llmstack_core_scheduler.protocols import DraftSource, KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.speculative_config import SpeculativeConfig
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_core_scheduler.suffix_drafts import SuffixDrafts
from llmstack_types import RequestStatus

_COMPLETE = frozenset((RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED))


class Drafting:
    """Asks a source for drafts and allocates their slots. Drafts have the lowest priority and never preempt.

    Attributes:
        has_source: Whether there is anything to ask.
        num_drafts: Counter of rows that were scheduled with drafts.
        num_draft_tokens: Counter of drafts that were scheduled.
        num_accepted: Counters of those that were right and are part of an answer, by their place in the row.
    """

    def __init__(self, source: DraftSource | None, config: SchedulerConfig, manager: KVCacheManager) -> None:
        """Without a source and a configured one there are no drafts."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted = [0] * config.max_num_drafts
        self._source = _make_source(config.speculative) if source is None and config.speculative else source
        self.has_source = self._source is not None
        # A draft model reads the prompt first, and no first token waits for that.
        self._follows_output = isinstance(self._source, ModelDrafts)
        is_adaptive = config.speculative is not None and config.speculative.is_adaptive
        self._lengths = DraftLengths(config.speculative) if config.speculative and is_adaptive else None
        self._max_num_step_tokens = config.max_num_batched_tokens
        self._manager = manager

    def extend(self, plan: StepPlan) -> None:
        """Adds drafts to the rows that sample, first come first served, if they repay what they cost all rows."""
        if self._source is None or (self._lengths is not None and not self._lengths.may_have_drafts(len(plan.rows))):
            return
        index_to_drafts: dict[int, list[int]] = {}
        budget = plan.budget
        for index, request in enumerate(plan.requests):
            if not budget:
                break
            draft_token_ids = self._propose(self._source, request, budget, len(plan.rows))
            if draft_token_ids:
                index_to_drafts[index] = draft_token_ids
                budget -= len(draft_token_ids)
        if index_to_drafts and self._repay(plan, index_to_drafts):
            self._add(plan, index_to_drafts)

    def _repay(self, plan: StepPlan, index_to_drafts: Mapping[int, Sequence[int]]) -> bool:
        if self._lengths is None:
            return True
        ids_and_numbers = [(plan.requests[index].request_id, len(own)) for index, own in index_to_drafts.items()]
        return self._lengths.repay(ids_and_numbers, len(plan.rows))

    def _add(self, plan: StepPlan, index_to_drafts: Mapping[int, list[int]]) -> None:
        for index, draft_token_ids in index_to_drafts.items():
            request = plan.requests[index]
            new_block_ids = self._make_room(request, len(draft_token_ids))
            if new_block_ids is not None:
                plan.add_drafts(index, draft_token_ids, new_block_ids)
                self.num_drafts += 1
                self.num_draft_tokens += len(draft_token_ids)

    def settle(self, request: Request, num_drafts: int, num_accepted: int, is_stale: bool) -> None:
        """Takes the slots of the rejected drafts back: the request's next tokens are computed into them.

        `is_stale` says that the request's blocks have gone since.
        """
        if self._lengths is not None:
            self._lengths.note_verified(request.request_id, num_drafts, num_accepted)
        for place in range(num_accepted):
            self.num_accepted[place] += 1
        request.num_tokens = len(request.token_ids)
        if not is_stale and self._manager.has_states:
            request.num_computed_tokens -= num_drafts  # to the last state: those accepted are computed from there again
        elif not is_stale:
            request.num_computed_tokens = request.num_tokens - 1

    def end(self, request: Request, status: RequestStatus) -> None:
        """Forgets a request that ends with this status; the source may learn from an answer that is complete."""
        if self._source is not None and status in _COMPLETE:
            owner = (request.arrival.tenant, request.prefix_salt)
            self._source.learn(owner, request.token_ids[request.num_prompt_tokens :])
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Tells the source that the request has ended or lost its row."""
        if self._source is not None:
            self._source.forget(request.request_id)
        if self._lengths is not None:
            self._lengths.forget(request.request_id)

    def _propose(self, source: DraftSource, request: Request, budget: int, num_rows: int) -> list[int]:
        num_tokens = request.num_computed_tokens
        if num_tokens != len(request.token_ids) or request.num_tokens == num_tokens:
            return []  # it samples nothing, or its last token, or what it begins with is not known yet
        if request.arrival.sampling_params.use_beam_search:
            return []  # the row is forked after its next token
        if self._follows_output and num_tokens <= request.num_prompt_tokens:
            return []
        # The row's own token follows the drafts, so one less than may still come; the last token needs no slot.
        limit = min(len(self.num_accepted), budget, request.max_num_tokens - num_tokens - 1)
        if self._lengths is not None:
            limit = self._lengths.limit(request.request_id, limit, num_rows, self._max_num_step_tokens - budget)
        if limit < 1:
            return []
        owner = (request.arrival.tenant, request.prefix_salt)
        return list(source.propose(request.request_id, request.token_ids, limit, owner))[:limit]

    def _make_room(self, request: Request, num_draft_tokens: int) -> list[int] | None:
        num_tokens = request.num_computed_tokens + num_draft_tokens
        if num_tokens <= request.num_slots:
            return []
        new_block_ids = self._manager.allocate_slots(request.request_id, num_tokens)
        if new_block_ids is not None:
            request.num_slots += len(new_block_ids) // self._manager.num_groups * self._manager.block_size
        return new_block_ids


def _make_source(config: SpeculativeConfig) -> DraftSource:
    if config.is_by_model:
        return ModelDrafts()
    return SuffixDrafts(config) if config.method == "suffix" else NgramDrafts(config)
