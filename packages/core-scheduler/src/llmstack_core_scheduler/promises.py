"""Why nobody is preempted without end: a request preempted often enough returns only when its blocks are certain.

A request that was preempted `max_num_preemptions` times is protected: it is admitted only if the free blocks suffice
for all that it, and everybody ahead of it by rank, can still grow to. Whoever is admitted ahead of a running protected
request later has to pass the same test.

So, while a protected request runs, let P be the last one by rank. The blocks that P and those ahead of it may still ask
for are at most those that are free, or held by the ones behind P alone: it was so when P was admitted; a block taken by
P or ahead of it shrinks both sides, one taken behind P stays on its side, one given back only adds. A request that
needs a block takes it from the last running request. If the needing one is P or ahead of it and no block is free, the
last one stands behind P; if it is behind P, so is the last one. Either way the victim is not protected: nobody is
preempted more than `max_num_preemptions` times.

Nor can it deadlock. The first running request always advances: its victims are all behind it. While a protected request
waits, nobody behind it is admitted, those ahead of it end one after the other, and with none left it fits, because no
request is accepted that does not fit alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_core_scheduler.request import Request


def keeps_promises(request: Request, running: Sequence[Request], num_free_blocks: int, block_size: int) -> bool:
    """Whether all protected requests remain certain of their blocks if `request` joins; O(running)."""
    last = max((other.rank for other in (*running, request) if other.is_protected), default=None)
    if last is None or request.rank > last:
        return True
    num_promised = num_blocks_to_come(request, block_size)
    num_promised += sum(num_blocks_to_come(other, block_size) for other in running if other.rank <= last)
    return num_promised <= num_free_blocks


def num_blocks_to_come(request: Request, block_size: int) -> int:
    """Blocks that the request may still ask for."""
    return max(-(-request.max_num_slots // block_size) - request.num_slots // block_size, 0)
