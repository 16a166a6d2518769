"""Prefixes that are copied out of the cache and written behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

from llmstack_core_scheduler.request import prefix_salt
from llmstack_engine_core.disk_cache.file_groups import Extent
from llmstack_engine_core.disk_cache.prefix_store import PrefixStore
from llmstack_engine_core.disk_cache.scopes import Chain
from llmstack_engine_core.disk_cache.write_behind import Pace, Sealable, WriteBehind
from llmstack_engine_core.protocols import TransferRunner
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import EngineCoreRequest, PrefixMedia

MAX_NUM_JOBS: Final = 256
"""Texts that wait to be written; over it the tenant with the most gives up its oldest."""
MAX_NUM_KNOWN: Final = 64
"""Extents of a text that are on disk already, and are passed in one go: a name takes a hash for each block."""
_ROOM_INTERVAL_S: Final = 0.001


class Cache(NamedTuple):
    """The prefix cache in memory: what finds its blocks, what reads and writes them, and their size in tokens.

    Lists of block ids have one of each of `num_groups` groups of layers for each block of tokens.
    """

    scheduler: Scheduler
    runner: TransferRunner
    block_size: int
    num_groups: int = 1

    def find(self, request: EngineCoreRequest, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """The blocks of the longest prefix that a request with these tokens finds, and its state."""
        return self.scheduler.cached_prefix(token_ids, *_scope_of(request))

    def num_found(self, request: EngineCoreRequest, token_ids: Sequence[int]) -> int:
        """The number of blocks of tokens in that prefix."""
        return len(self.find(request, token_ids)[0]) // self.num_groups

    def take(self, request: EngineCoreRequest, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Makes all blocks findable but that of the last token; those that are to be filled, and their state."""
        return self.scheduler.import_prefix(token_ids, *_scope_of(request))


def _scope_of(request: EngineCoreRequest) -> tuple[str, PrefixMedia]:
    items = tuple(replace(item, memory=None) for item in request.media)
    return prefix_salt(request.cache_salt, request.lora_name), PrefixMedia(request.cache_salt, items)


@dataclass(slots=True)
class _Job:
    """A text whose blocks are to be written.

    Attributes:
        token_ids: One more than its blocks hold, since a lookup leaves the last one.
        chain: The names of its blocks; None before they are looked up.
        block_ids: Where they were then.
        contents: What these blocks held, in their order.
        extents: What is left of them.
    """

    request: EngineCoreRequest
    token_ids: list[int]
    chain: Chain | None = None
    block_ids: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    extents: deque[Extent] = field(default_factory=deque)


class _Jobs:
    """The texts that wait, of which tenants are served in turns."""

    def __init__(self) -> None:
        self._tenant_to_jobs: dict[str, deque[_Job]] = {}  # whose turn is next is the first

    def __len__(self) -> int:
        return sum(map(len, self._tenant_to_jobs.values()))

    @property
    def next(self) -> _Job:
        """The text that is being copied; it stays until `end`."""
        return next(iter(self._tenant_to_jobs.values()))[0]

    def add(self, job: _Job) -> None:
        """Adds a text, for which another one may be given up."""
        self._tenant_to_jobs.setdefault(job.request.tenant, deque()).append(job)
        if len(self) > MAX_NUM_JOBS:
            self._drop(max(self._tenant_to_jobs, key=lambda tenant: len(self._tenant_to_jobs[tenant])))

    def end(self) -> None:
        """Removes the text that was copied; the turn is that of the next tenant."""
        tenant = next(iter(self._tenant_to_jobs))
        self._drop(tenant)
        if tenant in self._tenant_to_jobs:
            self._tenant_to_jobs[tenant] = self._tenant_to_jobs.pop(tenant)

    def _drop(self, tenant: str) -> None:
        self._tenant_to_jobs[tenant].popleft()
        if not self._tenant_to_jobs[tenant]:
            del self._tenant_to_jobs[tenant]

    def clear(self) -> None:
        """Gives all of them up."""
        self._tenant_to_jobs.clear()


class PrefixWrites:
    """Copies cached blocks, an extent at a time, for a thread that writes them. Used by the engine core's thread.

    A text is looked up once. A block that no longer holds then what it held ends its text. O(tokens) for a text.
    """

    def __init__(self, cache: Cache, store: PrefixStore, clock: Callable[[], float]) -> None:
        self._cache, self._store = cache, store
        self._pace = Pace(clock)
        self.behind = WriteBehind(store.files, self._pace, clock)
        self._jobs = _Jobs()

    @property
    def has_jobs(self) -> bool:
        """Whether a text waits."""
        return bool(self._jobs)

    def add(self, request: EngineCoreRequest, token_ids: list[int]) -> None:
        """Writes a text of a request some time later: all but the last token, which has been computed."""
        if len(token_ids) > self._cache.block_size:
            self._jobs.add(_Job(request, token_ids))

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

    def forget(self) -> None:
        """Gives up what waits; what has been copied is written."""
        self._jobs.clear()

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
        job = self._jobs.next
        chain = job.chain or self._look_up(job)
        is_kept = self._copy_extent(job, chain)
        if is_kept and job.extents:
            return
        self._jobs.end()
        if is_kept and self._store.has_states and self._is_new_name(chain.state_name(chain.num_blocks)):
            self._copy_state(job, chain)
        self.behind.after(partial(self._store.touch, chain, chain.num_blocks))

    def _look_up(self, job: _Job) -> Chain:
        job.block_ids, _ = self._cache.find(job.request, job.token_ids)
        job.contents = self._cache.scheduler.contents(job.block_ids)
        num_blocks = len(job.block_ids) // self._cache.num_groups
        job.token_ids = job.token_ids[: num_blocks * self._cache.block_size + 1]
        job.chain = self._store.chain(job.request, job.token_ids)
        # Those of windows first: the windows of requests that go on pass them.
        job.extents.extend(sorted(self._store.extents(0, num_blocks), key=lambda extent: not extent.window))
        return job.chain

    def _copy_extent(self, job: _Job, chain: Chain) -> bool:
        """Copies the next extent, and passes those before it that are there; False if it is lost."""
        for _ in range(min(len(job.extents), MAX_NUM_KNOWN)):
            extent = job.extents.popleft()
            if self._store.stored(chain, extent) or not self._is_new_name(self._store.name(chain, extent)):
                continue
            groups = self._store.groups
            block_ids, contents = groups.entries(job.block_ids, extent), groups.entries(job.contents, extent)
            if not all(contents) or self._cache.scheduler.contents(block_ids) != contents:
                return False
            text, start = self._store.content(chain, extent)
            if self._store.bytes_per_block:
                with memoryview(text) as view, view[start:] as out:
                    self._cache.runner.read_kv_blocks(block_ids, out)
            self.behind.add(Sealable(chain.scope, self._store.name(chain, extent), text))
            break
        return True

    def _copy_state(self, job: _Job, chain: Chain) -> None:
        block_ids, state_id = self._cache.find(job.request, job.token_ids)
        if len(block_ids) < chain.num_blocks * self._cache.num_groups:
            return
        text, start = self._store.state_content(chain)
        with memoryview(text) as view, view[start:] as out:
            self._cache.runner.read_kv_blocks([], out, state_id)
        self.behind.add(Sealable(chain.scope, chain.state_name(chain.num_blocks), text))

    def _is_new_name(self, name: str) -> bool:
        return name not in self._store.files and name not in self.behind
