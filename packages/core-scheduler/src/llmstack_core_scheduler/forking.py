"""Requests that run and that the runner does not know yet, such as forks."""

from __future__ import annotations

from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_types import RequestStatus


class Forking:
    """Forks that the runner does not know yet, and requests whose first row waits for the encoder.

    Forks run from the moment of the fork, so that their parent may end before the next step. That step makes their
    copies, since the parent's blocks may be another's in it. Each is introduced to the runner with its first row: in
    that step too, unless it is preempted or has to wait for its turn, as with several stages, or for the encoder.

    Attributes:
        num_forks: Counter of requests that began with another's blocks.
        request_id_to_copies: The requests, and the copies that are still to be made for each.
        request_id_to_held: Those of them that are no forks, and their tokens in blocks that others wrote.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.num_forks = 0
        self.request_id_to_copies: dict[str, list[tuple[int, int]]] = {}
        self.request_id_to_held: dict[str, int] = {}
        self._manager = manager

    def fork(self, parent: Request, child: Request) -> int:
        """Gives the child what it has in common with the parent; the number of tokens, 0 where there is no room."""
        num_tokens = self._num_common_tokens(parent, child)
        if not num_tokens or not self._manager.keeps_prefix(parent.request_id, num_tokens):
            return 0
        copies = self._manager.fork(parent.request_id, child.request_id, num_tokens)
        if copies is None:
            return 0
        self.request_id_to_copies[child.request_id] = copies
        # `num_slots` stays 0, so that the child asks for room in its first step and is introduced then.
        child.change_status(RequestStatus.RUNNING)
        child.num_computed_tokens = child.num_cached_tokens = num_tokens
        self.num_forks += 1
        return num_tokens

    def hold(self, request: Request, num_held_tokens: int, plan: StepPlan) -> None:
        """A request runs from now on, and has no row in its first step; `num_held_tokens` as in `NewRequest`."""
        self.request_id_to_held[request.request_id] = num_held_tokens
        plan.leave(request)
        # `num_slots` stays 0 here too.
        self.request_id_to_copies[request.request_id] = []

    def copy(self, plan: StepPlan) -> None:
        """Makes all copies in the step, before it allocates a block."""
        for request_id, copies in self.request_id_to_copies.items():
            plan.block_copies += copies
            self.request_id_to_copies[request_id] = []

    def introduce(self, child: Request, plan: StepPlan) -> list[int] | None:
        """The whole table of a fork that the runner does not know yet; None for any other request."""
        if self.request_id_to_copies.pop(child.request_id, None) is None:
            return None
        plan.introduce(child, self.request_id_to_held.pop(child.request_id, 0))
        block_ids = self._manager.block_table(child.request_id)
        child.num_slots = len(block_ids) // self._manager.num_groups * self._manager.block_size
        return block_ids

    def forget(self, request_id: str) -> bool:
        """Drops a fork that the runner does not know, which then never will; False for any other request."""
        self.request_id_to_held.pop(request_id, None)
        return self.request_id_to_copies.pop(request_id, None) is not None

    def _num_common_tokens(self, parent: Request, child: Request) -> int:
        limit = min(parent.num_computed_tokens, len(parent.token_ids), len(child.token_ids) - 1)
        ours, theirs = parent.keys[:limit], child.keys[:limit]
        num_tokens = limit
        if ours != theirs:
            num_tokens = next(index for index in range(limit) if ours[index] != theirs[index])
        if self.request_id_to_copies.get(parent.request_id):  # what it has begun is still to be copied itself
            return num_tokens // self._manager.block_size * self._manager.block_size
        return num_tokens
