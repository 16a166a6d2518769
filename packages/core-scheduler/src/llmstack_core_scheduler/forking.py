"""Forks of running requests between two steps."""

from __future__ import annotations

from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_types import RequestStatus


class Forking:
    """Forks that the runner does not know yet.

    They run from the moment of the fork, so that their parent may end before the next step. In that step each is either
    introduced to the runner or preempted.

    Attributes:
        num_forks: Counter of requests that began with another's blocks.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.num_forks = 0
        self._manager = manager
        self._request_id_to_copies: dict[str, list[tuple[int, int]]] = {}

    def fork(self, parent: Request, child: Request) -> int:
        """Gives the child what it has in common with the parent; the number of tokens, 0 where there is no room."""
        num_tokens = self._num_common_tokens(parent, child)
        if not num_tokens or not self._manager.keeps_prefix(parent.request_id, num_tokens):
            return 0
        copies = self._manager.fork(parent.request_id, child.request_id, num_tokens)
        if copies is None:
            return 0
        self._request_id_to_copies[child.request_id] = copies
        # `num_slots` stays 0, so that the child asks for room in its first step and is introduced then.
        child.change_status(RequestStatus.RUNNING)
        child.num_computed_tokens = child.num_cached_tokens = num_tokens
        self.num_forks += 1
        return num_tokens

    def introduce(self, child: Request, plan: StepPlan) -> list[int] | None:
        """The whole table of a fork that the runner does not know yet; None for any other request."""
        copies = self._request_id_to_copies.pop(child.request_id, None)
        if copies is None:
            return None
        plan.introduce(child)
        plan.block_copies += copies
        block_ids = self._manager.block_table(child.request_id)
        child.num_slots = len(block_ids) // self._manager.num_groups * self._manager.block_size
        return block_ids

    def forget(self, request_id: str) -> bool:
        """Drops a fork that the runner does not know, which then never will; False for any other request."""
        return self._request_id_to_copies.pop(request_id, None) is not None

    def _num_common_tokens(self, parent: Request, child: Request) -> int:
        limit = min(parent.num_computed_tokens, len(parent.token_ids), len(child.token_ids) - 1)
        ours, theirs = parent.token_ids[:limit], child.token_ids[:limit]
        num_tokens = limit
        if ours != theirs:
            num_tokens = next(index for index in range(limit) if ours[index] != theirs[index])
        if parent.request_id in self._request_id_to_copies:  # what it has begun is still to be copied itself
            return num_tokens // self._manager.block_size * self._manager.block_size
        return num_tokens
