"""Prefixes that are copied out of the cache and written behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from llmstack_core_scheduler.request import prefix_salt
from llmstack_engine_core.disk_cache.prefix_store import Extent, PrefixStore
from llmstack_engine_core.disk_cache.scopes import Chain
from llmstack_engine_core.disk_cache.write_behind import Pace, Sealable, WriteBehind
from llmstack_engine_core.protocols import TransferRunner
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import EngineCoreRequest

MAX_NUM_JOBS: Final = 256
"""Texts that wait to be written; over it the oldest is given up."""
_ROOM_INTERVAL_S: Final = 0.001


class Cache(NamedTuple):
    """The prefix cache in memory: what finds its blocks, what reads and writes them, and their size in tokens."""

    scheduler: Scheduler
    runner: TransferRunner
    block_size: int

    def find(self, request: EngineCoreRequest, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """The blocks of the longest prefix that a request with these tokens finds, and its state."""
        return self.scheduler.cached_prefix(token_ids, prefix_salt(request.cache_salt, request.lora_name))

    def take(self, request: EngineCoreRequest, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Makes all blocks findable but that of the last token; those that are to be filled, and their state."""
        return self.scheduler.import_prefix(token_ids, prefix_salt(request.cache_salt, request.lora_name))


@dataclass(slots=True)
class _Job:
    """A text whose blocks are to be written.

    Attributes:
        token_ids: One more than its blocks hold, since a lookup leaves the last one.
        chain: The names of its blocks; None before the first is copied.
        extents: What is left of them.
    """

    request: EngineCoreRequest
    token_ids: list[int]
    chain: Chain | None = None
    extents: list[Extent] = field(default_factory=list)


class PrefixWrites:
    """Copies cached blocks, an extent at a time, for a thread that writes them. Used by the engine core's thread.

    Blocks are found by their tokens when they are copied: one that was evicted before ends its text.
    """

    def __init__(self, cache: Cache, store: PrefixStore, clock: Callable[[], float]) -> None:
        self._cache, self._store = cache, store
        self._pace = Pace(clock)
        self.behind = WriteBehind(store.files, self._pace, clock)
        self._jobs: deque[_Job] = deque(maxlen=MAX_NUM_JOBS)

    @property
    def has_jobs(self) -> bool:
        """Whether a text waits."""
        return bool(self._jobs)

    def add(self, request: EngineCoreRequest, token_ids: list[int]) -> None:
        """Writes a text of a request some time later: all but the last token, which has been computed."""
        if len(token_ids) > self._cache.block_size:
            self._jobs.append(_Job(request, token_ids))

    def copy(self) -> bool:
        """Copies the next extent, if one waits, the thread has room and the share of the processor allows it."""
        if not self._jobs or not self._pace.is_due() or not self.behind.has_room():
            return False
        begun_s = time.thread_time()
        self._copy_next()
        self._pace.spend(time.thread_time() - begun_s)
        return True

    def clear(self) -> None:
        """Gives up what waits, and removes all files."""
        self._jobs.clear()
        self.behind.after(self._store.files.clear)

    def finish(self, wait_s: float) -> None:
        """Copies and writes what is left, at full speed for at most `wait_s`; then the thread ends."""
        end_s = time.monotonic() + wait_s
        while self._jobs and time.monotonic() < end_s:
            if self.behind.has_room():
                self._copy_next()
            else:
                time.sleep(_ROOM_INTERVAL_S)
        self._jobs.clear()
        self.behind.close(max(end_s - time.monotonic(), 0.0))

    def _copy_next(self) -> None:
        job = self._jobs[0]
        block_ids, state_id = self._cache.find(job.request, job.token_ids)
        if job.chain is None:
            job.token_ids = job.token_ids[: len(block_ids) * self._cache.block_size + 1]
            job.chain = self._store.chain(job.request, job.token_ids)
            job.extents = self._store.extents(0, len(block_ids))
        chain, num_blocks = job.chain, job.chain.num_blocks
        while job.extents and not self._is_new(chain.name(job.extents[0].end)):
            job.extents.pop(0)
        needed = num_blocks if self._store.has_states or not job.extents else job.extents[0].end
        is_lost = len(block_ids) < needed
        if job.extents and not is_lost:
            self._copy_extent(chain, job.extents.pop(0), block_ids)
        if job.extents and not is_lost:
            return
        self._jobs.popleft()
        if self._store.has_states and not is_lost and self._is_new(chain.state_name(num_blocks)):
            self._copy_state(chain, state_id)
        self.behind.after(partial(self._store.touch, chain, num_blocks))

    def _copy_extent(self, chain: Chain, extent: Extent, block_ids: list[int]) -> None:
        text, start = self._store.content(chain, extent)
        if self._store.bytes_per_block:
            with memoryview(text) as view, view[start:] as out:
                self._cache.runner.read_kv_blocks(block_ids[extent.start : extent.end], out)
        self.behind.add(Sealable(chain.scope, chain.name(extent.end), text))

    def _copy_state(self, chain: Chain, state_id: int) -> None:
        text, start = self._store.state_content(chain)
        with memoryview(text) as view, view[start:] as out:
            self._cache.runner.read_kv_blocks([], out, state_id)
        self.behind.add(Sealable(chain.scope, chain.state_name(chain.num_blocks), text))

    def _is_new(self, name: str) -> bool:
        return name not in self._store.files and name not in self.behind
