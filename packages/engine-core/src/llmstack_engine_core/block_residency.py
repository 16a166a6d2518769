"""Lifetimes of the content of KV blocks.

They are read from the block tables of the steps, for a sample of the blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from llmstack_engine_core.protocols import EventHook
from llmstack_types import BlockEviction, ScheduledRequest, SchedulerOutput

MAX_REUSE_GAPS = 4
"""Times between uses that are kept of one content; a block of a system prompt is used without end."""
MAX_UNSENT = 4096


@dataclass(slots=True)
class _Content:
    since_s: float
    used_s: float
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_REUSE_GAPS))


class BlockResidency(EventHook):
    """Follows every n-th block. A block allocated again has lost its content; one that is found is used again."""

    def __init__(self, block_size: int, sample: float, clock: Callable[[], float], num_groups: int = 0) -> None:
        """`sample`: Share of the blocks that is followed, in (0, 1].

        `num_groups`: Groups of layers with block tables of their own, for which block 0 is the null block; 0 for none.
        """
        self._block_size = block_size
        self._num_groups = max(num_groups, 1)
        self._first_block_id = 1 if num_groups else 0
        self._stride = max(round(1 / sample), 1)
        self._clock = clock
        self._contents: dict[int, _Content] = {}
        self._unsent: deque[BlockEviction] = deque(maxlen=MAX_UNSENT)

    def on_scheduled(self, scheduled: SchedulerOutput) -> None:
        """Reads the step's tables."""
        rows = [row for row in scheduled.scheduled_requests if row.new_block_ids]
        if not rows:
            return
        now_s, introduced = self._clock(), {request.request_id for request in scheduled.new_requests}
        # Their tables begin with blocks that hold something; what is copied into some of those is new there.
        filled = {block_id for _, block_id in (*scheduled.swap_ins, *scheduled.block_copies)}
        for row in rows:
            num_found = row.num_computed_tokens // self._block_size if row.request_id in introduced else 0
            num_found *= self._num_groups
            self._read(row, num_found, filled, now_s)

    def take(self) -> tuple[BlockEviction, ...]:
        """The evictions since the last call."""
        if not self._unsent:
            return ()
        unsent = tuple(self._unsent)
        self._unsent.clear()
        return unsent

    def _read(self, row: ScheduledRequest, num_found: int, filled: set[int], now_s: float) -> None:
        for index, block_id in enumerate(row.new_block_ids):
            if block_id % self._stride or block_id < self._first_block_id:
                continue
            if index < num_found and block_id not in filled:
                self._use(block_id, now_s)
            else:
                self._renew(block_id, now_s)

    def _use(self, block_id: int, now_s: float) -> None:
        content = self._contents.get(block_id)
        if content is not None:
            content.gaps_s.append(now_s - content.used_s)
            content.used_s = now_s

    def _renew(self, block_id: int, now_s: float) -> None:
        lost = self._contents.get(block_id)
        if lost is not None:
            self._unsent.append(BlockEviction(now_s - lost.since_s, now_s - lost.used_s, tuple(lost.gaps_s)))
        self._contents[block_id] = _Content(now_s, now_s)
