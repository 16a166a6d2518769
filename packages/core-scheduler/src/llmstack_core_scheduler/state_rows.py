"""States of rows: where chunks are cut for them, and which are worth keeping."""

from __future__ import annotations

from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.step_plan import StepPlan


class StateRows:
    """Rows of a model that has layers with a state, which later requests can only find where a chunk has ended.

    So chunks end at block boundaries, and always at three places: at the last boundary of the prompt; where keys and
    values were found beyond the last state, since other requests are likely to part there too; and at the multiples of
    an interval, if one is configured. Without one every chunk's end is kept. Of an answer the last boundary is kept.
    """

    def __init__(self, manager: KVCacheManager, interval: int) -> None:
        """`interval`: Tokens of a prompt between states that are kept; 0 keeps those where its chunks end anyway."""
        self._manager = manager
        self._block_size = manager.block_size
        self._interval = -(-interval // self._block_size) * self._block_size

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        """The number of the request's next tokens, from `start` on, that one row computes; at least 1."""
        end = start + num_tokens
        stops = [self._last_boundary(request), request.num_known_tokens]
        if self._interval:
            stops.append((start // self._interval + 1) * self._interval)
        end = min([end, *(stop for stop in stops if start < stop <= self._last_boundary(request))])
        whole_blocks = end // self._block_size * self._block_size
        return (whole_blocks if end < request.num_tokens and whole_blocks > start else end) - start

    def finish(self, plan: StepPlan) -> None:
        """Gives each row of a complete plan the state blocks that it reads and writes.

        The state is that after the row's known tokens. Drafts change none, so none has to be taken back.
        """
        for row, request in zip(plan.rows, plan.requests, strict=True):
            end = row.num_computed_tokens + row.num_scheduled_tokens - len(row.draft_token_ids)
            is_answer = end > request.num_prompt_tokens
            plan.states.append(
                self._manager.advance_state(
                    row.request_id, end, is_kept=is_answer or self._is_kept(request, end), replaces_last=is_answer
                )
            )
        self._manager.end_step()

    def _is_kept(self, request: Request, end: int) -> bool:
        if not self._interval or end % self._interval == 0 or end == request.num_prompt_tokens:
            return True
        return end in (self._last_boundary(request), request.num_known_tokens)

    def _last_boundary(self, request: Request) -> int:
        """Tokens of the prompt up to its last block boundary that a lookup of the same prompt can find."""
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size


def make_state_rows(manager: KVCacheManager, interval: int) -> StateRows | None:
    """As `StateRows`; None where the model has no states."""
    return StateRows(manager, interval) if manager.has_states else None
