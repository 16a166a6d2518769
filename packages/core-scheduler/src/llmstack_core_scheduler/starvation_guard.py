"""Starvation guard: a bound on how often a request is preempted.

A request that was preempted `max_num_preemptions` times is protected. It is admitted only if the free blocks suffice
for all that it, and all requests ahead of it by rank, can still grow to. A request that is admitted ahead of a running
protected request has to pass the same test.

So, while a protected request runs, let P be the last one by rank. The blocks that P and those ahead of it may still ask
for are at most those that are free, or held by the ones behind P alone. It was so when P was admitted. A block taken by
P or ahead of it shrinks both sides, one taken behind P stays on its side, one given back adds to both or to the second.
A request that needs a block takes it from the last running request. If the needing one is P or ahead of it and no block
is free, the last one stands behind P; if it is behind P, so is the last one. Either way the victim is not protected:
no request is preempted more than `max_num_preemptions` times.

With sliding windows a request gives blocks back and asks for others in their place. It may then still ask for the most
that it ever holds less what it holds alone: a block that it shares is not free when it is given back.

Nor can it deadlock. The first running request always advances: its victims are all behind it. While a protected request
waits, no request behind it is admitted and those ahead of it end one after the other. With none left it fits, because
no request is accepted that does not fit alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_core_scheduler.block_needs import BlockNeeds
from llmstack_core_scheduler.request import Request


def leaves_room_for_protected(
    request: Request, running: Sequence[Request], num_free_blocks: int, needs: BlockNeeds
) -> bool:
    """Whether all protected requests remain certain of their blocks if `request` is admitted; O(running)."""
    last = max((other.rank for other in (*running, request) if other.is_protected), default=None)
    if last is None or request.rank > last:
        return True
    num_certain_blocks = needs.to_come(request)
    num_certain_blocks += sum(needs.to_come(other) for other in running if other.rank <= last)
    return num_certain_blocks <= num_free_blocks
