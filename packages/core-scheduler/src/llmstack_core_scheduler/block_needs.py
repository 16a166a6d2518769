"""Numbers of blocks for requests, in terms of the scheduler's own limits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request


class BlockNeeds:
    """Asks the cache manager for the needs of requests that take steps of bounded size.

    With full attention a request needs a block for every `block_size` of its tokens. With sliding windows it needs
    what its windows and one step reach over, which is less.
    """

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager) -> None:
        self._manager = manager
        self._max_num_step_tokens = config.max_num_step_tokens

    def num_slots(self, block_ids: list[int]) -> int:
        """Tokens that the blocks of a table have room for."""
        return len(block_ids) // self._manager.num_groups * self._manager.block_size

    def of_length(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` tokens needs if it runs alone from its first token."""
        return self._manager.num_blocks_needed(num_tokens, 0, self._max_num_step_tokens)

    def fit_pool(self, num_tokens: int) -> bool:
        """Whether the pool suffices for a request of `num_tokens` tokens that runs alone."""
        return self.of_length(num_tokens) <= self._manager.num_blocks

    def longest_length(self, max_num_tokens: int) -> int:
        """Most tokens, below `max_num_tokens`, of a request for which the pool suffices."""
        return bisect_left(range(max_num_tokens), True, key=lambda num_tokens: not self.fit_pool(num_tokens)) - 1

    def to_admit(self, request: Request, num_computed_tokens: int, num_found_tokens: int) -> int:
        """Blocks that all known tokens of a waiting request need, beside those that its found tokens are in.

        Args:
            request: The request.
            num_computed_tokens: Its tokens that need not be computed.
            num_found_tokens: Computed tokens whose blocks are held by others or cached; whole blocks.
        """
        needed, most = self._manager.num_blocks_needed, self._max_num_step_tokens
        return needed(request.num_tokens, num_computed_tokens, most) - needed(num_found_tokens, num_found_tokens, most)

    def free_passed(self, requests: Iterable[Request]) -> None:
        """Frees what the sliding windows of running requests have passed; before a step allocates any."""
        advance = self._manager.advance
        for request in requests:
            # Without tokens to compute it may have drafts under way, which may turn out to be wrong.
            if request.next_passed_token <= request.num_computed_tokens < request.num_tokens:
                request.next_passed_token = advance(request.request_id, request.num_computed_tokens)

    def to_come(self, request: Request) -> int:
        """Blocks that the request may still ask for, beside those it holds and gives up on the way."""
        return max(self.of_length(request.max_num_slots) - self._manager.num_held_blocks(request.request_id), 0)
