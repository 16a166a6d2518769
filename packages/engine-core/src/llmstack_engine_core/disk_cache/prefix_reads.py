"""Prefixes that are read from disk while their requests wait."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from llmstack_engine_core.disk_cache.block_files import BlockMissError
from llmstack_engine_core.disk_cache.prefix_store import Extent, PrefixStore
from llmstack_engine_core.disk_cache.prefix_writes import Cache
from llmstack_engine_core.disk_cache.scopes import Chain
from llmstack_types import EngineCoreRequest

MIN_NUM_TOKENS: Final = 64
"""Fewer tokens are computed: that takes less than the step for which a request would wait."""
MAX_TOKEN_BYTES: Final = 1 << 20
"""Tokens of more bytes are computed: at 1 GB/s a token of them takes a millisecond to read."""
MAX_NUM_READING: Final = 2
"""Requests whose blocks are read at one time; the others wait."""
READ_TIMEOUT_S: Final = 5.0
_PIECE_BYTES: Final = 64 << 20
_MAX_NUM_PIECES: Final = 16


class _Piece(NamedTuple):
    """Extents that were read, with their blocks and the state after them; what was left, and why."""

    extents: list[Extent]
    contents: list[bytearray]
    state: bytearray
    left: Sequence[Extent] = ()
    cause: str = ""


@dataclass(slots=True, eq=False)
class _Read:
    """A request that waits for its blocks.

    Attributes:
        token_ids: One more than the blocks hold.
        start: Blocks that were in memory when it came.
        left: Pieces that are still to be read.
        piece: The piece that is being read, until `deadline_s`; None before the first.
    """

    request: EngineCoreRequest
    token_ids: list[int]
    names: Chain
    start: int
    left: deque[list[Extent]]
    piece: Future[_Piece] | None = None
    deadline_s: float = 0.0


class PrefixReads:
    """Reads prefixes in threads, a piece at a time, and makes their blocks findable. Used by the engine core's thread.

    Whether a prefix is read or computed depends on numbers of tokens and bytes alone. What was read is an import of the
    scheduler, as of blocks of another engine core, so the step log has it.

    Attributes:
        num_requests: Counter of requests that looked for blocks on disk.
        num_tokens: Counter of tokens that were read.
        num_bytes: Counter of bytes that were read.
        misses: Counter of requests by what ended the search.
    """

    def __init__(self, cache: Cache, store: PrefixStore, clock: Callable[[], float]) -> None:
        self.num_requests = self.num_tokens = self.num_bytes = 0
        self.misses: Counter[str] = Counter()
        self._cache, self._store, self._clock = cache, store, clock
        self._reads: dict[str, _Read] = {}
        self._num_tokens: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(MAX_NUM_READING, "read-kv")

    def __len__(self) -> int:
        return len(self._reads)

    def begin(self, request: EngineCoreRequest, token_ids: list[int]) -> bool:
        """Looks for a text of a request; True if the request waits for blocks from now on."""
        size = self._cache.block_size
        max_blocks = (len(token_ids) - 1) // size
        if max_blocks * size < MIN_NUM_TOKENS or self._store.bytes_per_block > size * MAX_TOKEN_BYTES:
            return False
        start = len(self._cache.find(request, token_ids)[0])
        if (max_blocks - start) * size < MIN_NUM_TOKENS:
            return False
        self.num_requests += 1
        names = self._store.chain(request, token_ids)
        end = self._store.find(names, max_blocks)
        if (end - start) * size < MIN_NUM_TOKENS:
            self.misses["absent"] += 1
            return False
        left = self._pieces(self._store.extents(start, end))
        self._reads[request.request_id] = _Read(request, token_ids[: end * size + 1], names, start, left)
        self._read_next()
        return True

    def take_ready(self, wait_s: float) -> list[EngineCoreRequest]:
        """The requests that wait no longer; waits at most `wait_s` for one."""
        pieces = [one.piece for one in self._reads.values() if one.piece is not None]
        if wait_s and pieces:
            wait(pieces, wait_s, FIRST_COMPLETED)
        ready = [one for one in list(self._reads.values()) if one.piece is not None and self._goes_on(one, one.piece)]
        for one in ready:
            del self._reads[one.request.request_id]
        self._read_next()
        return [one.request for one in ready]

    def take_num_tokens(self, request_id: str) -> int:
        """How many tokens of a request were read; once."""
        return self._num_tokens.pop(request_id, 0)

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended."""
        for request_id in request_ids:
            self._num_tokens.pop(request_id, None)
            one = self._reads.pop(request_id, None)
            if one is not None and one.piece is not None:
                one.piece.cancel()

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _pieces(self, extents: list[Extent]) -> deque[list[Extent]]:
        """The extents in pieces; all in one where a state belongs to them."""
        extent_bytes = max(extents[0].num_blocks * self._store.bytes_per_block, 1)
        num_extents = max(_PIECE_BYTES // extent_bytes, -(-len(extents) // _MAX_NUM_PIECES), 1)
        if self._store.has_states:
            num_extents = len(extents)
        return deque(extents[start : start + num_extents] for start in range(0, len(extents), num_extents))

    def _read_next(self) -> None:
        num_free = MAX_NUM_READING - sum(one.piece is not None for one in self._reads.values())
        for one in [one for one in self._reads.values() if one.piece is None][: max(num_free, 0)]:
            self._submit(one)

    def _submit(self, one: _Read) -> None:
        one.piece = self._threads.submit(self._read, one.names, one.left.popleft())
        one.deadline_s = self._clock() + READ_TIMEOUT_S

    def _read(self, names: Chain, extents: list[Extent]) -> _Piece:
        """Reads extents in a thread, as far as they are there and right."""
        contents: list[bytearray] = []
        try:
            state = self._store.read_state(names, extents[-1].end) if self._store.has_states else bytearray()
            for extent in extents:
                contents.append(self._store.read(names, extent))  # noqa: PERF401 (those before a miss count)
        except (BlockMissError, MemoryError) as miss:
            num_read = 0 if self._store.has_states else len(contents)
            cause = miss.cause if isinstance(miss, BlockMissError) else "no_room"
            return _Piece(extents[:num_read], contents, bytearray(), extents[len(contents) :], cause)
        return _Piece(extents, contents, state)

    def _goes_on(self, one: _Read, future: Future[_Piece]) -> bool:
        """Takes in what was read; True if the request waits no longer."""
        if not future.done():
            if self._clock() < one.deadline_s:
                return False
            future.cancel()
            self.misses["late"] += 1
            return True
        piece = future.result()
        cause = self._import(one, piece) or piece.cause
        if cause:
            self.misses[cause] += 1
        if piece.cause not in (
            "",
            "no_room",
        ):  # what follows may be damaged too; it is written again
            self._store.remove(one.names, [*piece.left, *chain.from_iterable(one.left)])
        if cause or not one.left:
            self._threads.submit(self._store.touch, one.names, len(one.token_ids) // self._cache.block_size)
            return True
        self._submit(one)
        return False

    def _import(self, one: _Read, piece: _Piece) -> str:
        """Makes the blocks of a piece findable and fills them; what was in the way."""
        if not piece.extents:
            return ""
        size, end = self._cache.block_size, piece.extents[-1].end
        token_ids = one.token_ids[: end * size + 1]
        # Before anything is made findable: the blocks before these may have been evicted again.
        if len(self._cache.find(one.request, token_ids)[0]) < piece.extents[0].start:
            return "evicted"
        block_ids, state_id = self._cache.take(one.request, token_ids)
        if not (block_ids or state_id):
            return "" if len(self._cache.find(one.request, token_ids)[0]) >= end else "no_room"
        first = end - len(block_ids)
        for extent, content in zip(piece.extents, piece.contents, strict=True):
            start = max(extent.start, first)
            if start < extent.end and content:
                ids = block_ids[start - first : extent.end - first]
                self._cache.runner.write_kv_blocks(ids, memoryview(content), start - extent.start)
        if state_id:
            self._cache.runner.write_kv_blocks([], memoryview(piece.state), 0, state_id)
        self._count(one, piece, end)
        return ""

    def _count(self, one: _Read, piece: _Piece, end: int) -> None:
        num_tokens = (end - max(piece.extents[0].start, one.start)) * self._cache.block_size
        self.num_tokens += num_tokens
        self.num_bytes += sum(map(len, piece.contents)) + len(piece.state)
        request_id = one.request.request_id
        self._num_tokens[request_id] = self._num_tokens.get(request_id, 0) + num_tokens
