"""Lookups of long prompts in the prefix cache, some blocks in each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Final

from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_types import RequestStatus

LONG_PROMPT_TOKENS: Final = 8192
"""Longer ones are looked up in pieces; 0.2 ms at most for one that is not."""

# Half a millisecond on an AMD Zen 5: most of it packs 32,768 tokens.
_MAX_STEP_BLOCKS: Final = 2048
_MAX_STEP_TOKENS: Final = 32_768
_MIN_PIECE_BLOCKS: Final = 64
_TURN_BLOCKS: Final = 16  # what a turn costs at least, in blocks
# Behind a step with more tokens more is looked up: computing one takes several times as long as looking up a block.
_USUAL_STEP_TOKENS: Final = 2048

_rank_of = attrgetter("rank")


class PromptLookups:
    """Bounds what one step looks up of long prompts, whatever is found; others overtake a request that waits for it.

    A prompt is looked up when it could be admitted. Where a piece does not reach the end of what is known, the request
    waits, and the next steps go on with it: half of a step is for one tenant until its lookup ends, and the others take
    turns. Of each the first request by rank goes on. What is evicted in the meantime is looked up again.

    Attributes:
        pending: The requests that wait for their lookup, by tenant and id; the first tenant has half of the step.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.pending: dict[str, dict[str, Request]] = {}
        self._manager = manager
        self._max_num_blocks = max(min(_MAX_STEP_BLOCKS, _MAX_STEP_TOKENS // manager.block_size), _MIN_PIECE_BLOCKS)
        self._step, self._num_left_blocks = -1, 0

    def go_on(self, num_tokens: int) -> None:
        """Goes on with what waits, by one step's number of blocks; the last step had `num_tokens` tokens."""
        num_left = self._num_blocks_behind(num_tokens)
        while self.pending and num_left > 0:
            first, *others = self.pending
            # It keeps its place, so that one lookup after the other ends, and not all of them at last.
            num_left -= self._go_on_with(first, -(-num_left // 2) if others else num_left)
            piece = max(num_left // max(len(others), 1), _MIN_PIECE_BLOCKS)
            for tenant in others:
                if num_left <= 0:
                    break
                self.pending[tenant] = self.pending.pop(tenant)  # behind the others
                num_left -= self._go_on_with(tenant, min(piece, num_left))

    def waits(self, request: Request, step: int, num_tokens: int) -> bool:
        """Whether a request with a long prompt has to wait in `step`, since more of it may be found.

        Where nothing has been looked up, or more is known by now, this goes on with it. The last step had `num_tokens`.
        """
        of_tenant = self.pending.get(request.arrival.tenant, {})
        if request.request_id in of_tenant:
            return True
        if not _looks_up(request):
            return False
        if step != self._step:
            self._step, self._num_left_blocks = step, self._num_blocks_behind(num_tokens)
        if self._num_left_blocks > -self._max_num_blocks:  # else many have come in this step: it waits for its turn
            num_blocks = max(self._num_left_blocks // 2, _MIN_PIECE_BLOCKS)
            num_found = self._look(request, num_blocks)
            self._num_left_blocks -= num_found
            if num_found < num_blocks:
                return False
        of_tenant[request.request_id] = request
        self.pending[request.arrival.tenant] = of_tenant
        return True

    def drop(self, request: Request) -> None:
        """Forgets a request that ends while it waits."""
        of_tenant = self.pending.get(request.arrival.tenant, {})
        if of_tenant.pop(request.request_id, None) is not None and not of_tenant:
            del self.pending[request.arrival.tenant]

    def state(self) -> list[tuple[str, list[str]]]:
        """The tenants and the ids of their requests, as plain data; between steps."""
        return [(tenant, list(of_tenant)) for tenant, of_tenant in self.pending.items()]

    def restore(self, state: Iterable[tuple[str, list[str]]], requests: Mapping[str, Request]) -> None:
        """The inverse of `state`."""
        self.pending = {tenant: {name: requests[name] for name in names} for tenant, names in state}

    def _num_blocks_behind(self, num_tokens: int) -> int:
        return max(self._max_num_blocks * num_tokens // _USUAL_STEP_TOKENS, self._max_num_blocks)

    def _go_on_with(self, tenant: str, num_blocks: int) -> int:
        """One turn of a tenant, which goes behind the others where a lookup ends; the blocks that the turn counts."""
        of_tenant = self.pending[tenant]
        request = min(of_tenant.values(), key=_rank_of)
        num_found = self._look(request, num_blocks) if _looks_up(request) else 0
        if num_found < num_blocks:
            del of_tenant[request.request_id], self.pending[tenant]
            if of_tenant:
                self.pending[tenant] = of_tenant
        return max(num_found, _TURN_BLOCKS)

    def _look(self, request: Request, max_num_blocks: int) -> int:
        return self._manager.look_ahead(request.request_id, request.keys, max_num_blocks, request.prefix_salt)


def _looks_up(request: Request) -> bool:
    """Whether a waiting request gets its blocks from the prefix cache."""
    parent = request.parent
    has_others = request.status is RequestStatus.SWAPPED or (parent and parent.status is RequestStatus.RUNNING)
    return not has_others and not request.needs_whole_prompt
