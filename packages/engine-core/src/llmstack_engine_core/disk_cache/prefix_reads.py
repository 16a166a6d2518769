"""Prefixes that are read from disk while their requests wait."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

from llmstack_engine_core.disk_cache.block_files import BlockMissError
from llmstack_engine_core.disk_cache.file_groups import Extent
from llmstack_engine_core.disk_cache.prefix_store import PrefixStore
from llmstack_engine_core.disk_cache.prefix_writes import Cache
from llmstack_engine_core.disk_cache.scopes import Chain
from llmstack_types import EngineCoreRequest

MIN_NUM_TOKENS: Final = 64
"""Fewer tokens are computed: that takes less than the step for which a request would wait."""
MAX_TOKEN_BYTES: Final = 1 << 20
"""Where each token that is gained takes more bytes, it is computed: at 1 GB/s it would take a millisecond to read."""
MAX_NUM_READING: Final = 2
"""Pieces that are read at one time; the others wait."""
READ_TIMEOUT_S: Final = 5.0
MAX_KNOWN_TENANTS: Final = 1024
_PIECE_BYTES: Final = 16 << 20
"""While one is copied into blocks, the next ones are read."""
_NUM_PIECES: Final = 16
"""A longer prefix has larger pieces: before each one the prefix is looked up twice."""
_MAX_PIECE_BYTES: Final = 64 << 20
"""But none is larger than this, since steps wait while it is copied, and four may be in memory."""


class _Piece(NamedTuple):
    """Extents that were read, with their blocks and the state after them; what was left, and why."""

    extents: list[Extent]
    contents: list[bytearray]
    state: bytearray
    left: Sequence[Extent] = ()
    cause: str = ""


class _Reading(NamedTuple):
    """A piece that a thread reads, which has to be there at `deadline_s`."""

    extents: list[Extent]
    piece: Future[_Piece]
    deadline_s: float


@dataclass(slots=True, eq=False)
class _Read:
    """A request that waits for its blocks.

    Attributes:
        token_ids: One more than the blocks hold.
        start: Blocks that were in memory when it came.
        left: Pieces that no thread has begun.
        readings: Those that were begun, which are taken in their order.
    """

    request: EngineCoreRequest
    token_ids: list[int]
    names: Chain
    start: int
    left: deque[list[Extent]]
    readings: deque[_Reading] = field(default_factory=deque)


class Turns:
    """Whose turn it is: that of the tenant who had none for the longest time."""

    def __init__(self) -> None:
        self._tenants: dict[str, None] = {}  # who had the last turn is the last

    def take(self, tenants: Sequence[str]) -> str:
        """The tenant whose turn it is, which becomes the last one; new tenants come first."""
        tenant = next((one for one in tenants if one not in self._tenants), None)
        if tenant is None:
            wanted = {*tenants}
            tenant = next(one for one in self._tenants if one in wanted)
        self._tenants.pop(tenant, None)
        self._tenants[tenant] = None
        if len(self._tenants) > MAX_KNOWN_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return tenant


class PrefixReads:
    """Reads prefixes in threads, a piece at a time, and makes their blocks findable. Used by the engine core's thread.

    Pieces are read in turns of tenants: the long sessions of one do not hold up the requests of others. Those of a
    tenant are read in the order of its requests: the first one has all threads, and is done before the second.

    Whether a prefix is read or computed depends on numbers of tokens and bytes alone. What was read is an import of the
    scheduler, as of blocks of another engine core, so the step log has it.

    Attributes:
        num_requests: Counter of requests that looked for blocks on disk.
        num_tokens: Counter of tokens that were read.
        num_bytes: Counter of bytes that were read.
        misses: Counter of requests by what ended the search.
        causes: That of each request which has not begun since.
    """

    def __init__(self, cache: Cache, store: PrefixStore, clock: Callable[[], float]) -> None:
        self.num_requests = self.num_tokens = self.num_bytes = 0
        self.misses: Counter[str] = Counter()
        self.causes: dict[str, str] = {}
        self._cache, self._store, self._clock = cache, store, clock
        self._reads: dict[str, _Read] = {}
        self._num_tokens: dict[str, int] = {}
        self._turns = Turns()
        self._submitted: list[_Reading] = []  # also those that nothing waits for any more
        self._touches: list[tuple[float, Future[None]]] = []  # by when they have to be done
        self._threads = ThreadPoolExecutor(MAX_NUM_READING, "read-kv")

    def __len__(self) -> int:
        return len(self._reads)

    @property
    def is_stuck(self) -> bool:
        """Whether all threads are at what should have been done, whether or not anything waits for it."""
        now_s = self._clock()
        late = [one for one in self._submitted if one.deadline_s <= now_s and not one.piece.done()]
        return len(late) + sum(end_s <= now_s and not one.done() for end_s, one in self._touches) >= MAX_NUM_READING

    def begin(self, request: EngineCoreRequest, token_ids: list[int]) -> bool:
        """Looks for a text of a request; True if the request waits for blocks from now on."""
        size = self._cache.block_size
        max_blocks = (len(token_ids) - 1) // size
        if max_blocks * size < MIN_NUM_TOKENS or self._store.bytes_per_block > size * MAX_TOKEN_BYTES:
            return False
        start = self._cache.num_found(request, token_ids)
        if (max_blocks - start) * size < MIN_NUM_TOKENS:
            return False
        self.num_requests += 1
        names = self._store.chain(request, token_ids)
        end = self._store.find(names, max_blocks)
        if (end - start) * size < MIN_NUM_TOKENS:
            self._miss(request, "absent")
            return False
        if self.is_stuck:
            self._miss(request, "late")
            return False
        extents = [self._store.stored(names, extent) or extent for extent in self._store.extents(start, end)]
        # The state behind a short gain may be larger than what it saves; a file is read as a whole.
        if self._store.num_bytes(extents) > (end - start) * size * MAX_TOKEN_BYTES:
            self._miss(request, "costly")
            return False
        left = self._pieces(extents)
        self._reads[request.request_id] = _Read(request, token_ids[: end * size + 1], names, start, left)
        self._read_next()
        return True

    def take_ready(self, wait_s: float) -> list[EngineCoreRequest]:
        """The requests that wait no longer; waits at most `wait_s` for one."""
        firsts = [one.readings[0].piece for one in self._reads.values() if one.readings]
        pieces = firsts or [one.piece for one in self._submitted]  # those of requests that have left
        if wait_s and pieces:
            wait(pieces, wait_s, FIRST_COMPLETED)
        ready = [one for one in self._reads.values() if self._goes_on(one)]
        if self.is_stuck:  # the others would each wait as long for their turn
            waiting = [one for one in self._reads.values() if not one.readings and one not in ready]
            for one in waiting:
                self._miss(one.request, "late")
            ready += waiting
        for one in ready:
            del self._reads[one.request.request_id]
        self._read_next()
        return [one.request for one in ready]

    def take_num_tokens(self, request_id: str) -> int:
        """The number of tokens of a request that were read; once."""
        return self._num_tokens.pop(request_id, 0)

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended."""
        for request_id in request_ids:
            self._num_tokens.pop(request_id, None)
            self.causes.pop(request_id, None)
            one = self._reads.pop(request_id, None)
            if one is not None:
                _cancel(one.readings)

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _miss(self, request: EngineCoreRequest, cause: str) -> None:
        self.misses[cause] += 1
        self.causes[request.request_id] = cause

    def _pieces(self, extents: list[Extent]) -> deque[list[Extent]]:
        """The extents in pieces; all in one where a state or blocks of windows belong to them."""
        extent_bytes = max(extents[0].num_blocks * self._store.bytes_per_block, 1)
        num_extents = min(-(-len(extents) // _NUM_PIECES), _MAX_PIECE_BYTES // extent_bytes)
        num_extents = max(num_extents, _PIECE_BYTES // extent_bytes, 1)
        if self._store.needs_end:
            num_extents = len(extents)
        return deque(extents[start : start + num_extents] for start in range(0, len(extents), num_extents))

    def _read_next(self) -> None:
        self._submitted = [one for one in self._submitted if not one.piece.done()]
        self._touches = [(end_s, one) for end_s, one in self._touches if not one.done()]
        while len(self._submitted) < MAX_NUM_READING:
            # Behind a piece that takes long no more than so many wait in memory.
            waiting = [one for one in self._reads.values() if one.left and len(one.readings) < MAX_NUM_READING]
            if not waiting:
                return
            tenant = self._turns.take([one.request.tenant for one in waiting])
            self._submit(next(one for one in waiting if one.request.tenant == tenant))  # that came first

    def _submit(self, one: _Read) -> None:
        extents = one.left.popleft()
        piece = self._threads.submit(self._read, one.names, extents)
        reading = _Reading(extents, piece, self._clock() + READ_TIMEOUT_S)
        self._submitted.append(reading)
        one.readings.append(reading)

    def _read(self, names: Chain, extents: list[Extent]) -> _Piece:
        """Reads extents in a thread, as far as they are there and right."""
        contents: list[bytearray] = []
        try:
            state = self._store.read_state(names, extents[-1].end) if self._store.has_states else bytearray()
            for extent in extents:
                contents.append(self._store.read(names, extent))  # noqa: PERF401 (those before a miss count)
        except (BlockMissError, MemoryError) as miss:
            num_read = 0 if self._store.needs_end else len(contents)
            cause = miss.cause if isinstance(miss, BlockMissError) else "no_room"
            return _Piece(extents[:num_read], contents, bytearray(), extents[len(contents) :], cause)
        return _Piece(extents, contents, state)

    def _goes_on(self, one: _Read) -> bool:
        """Takes in what was read; True if the request waits no longer."""
        while one.readings:
            reading = one.readings[0]
            if not reading.piece.done():
                if self._clock() < reading.deadline_s:
                    return False
                _cancel(one.readings)
                self._miss(one.request, "late")
                return True
            one.readings.popleft()
            if self._take_in(one, reading.piece.result()):
                return True
        return False  # its next piece waits for its turn

    def _take_in(self, one: _Read, piece: _Piece) -> bool:
        """Imports a piece; True if the request waits no longer."""
        cause = self._import(one, piece) or piece.cause
        if cause:
            self._miss(one.request, cause)
        if piece.cause not in ("", "no_room"):  # what follows may be damaged too; it is written again
            begun = chain.from_iterable(reading.extents for reading in one.readings)
            self._store.remove(one.names, [*piece.left, *begun, *chain.from_iterable(one.left)])
        if not cause and (one.left or one.readings):
            return False
        _cancel(one.readings)
        touch = self._threads.submit(self._store.touch, one.names, len(one.token_ids) // self._cache.block_size)
        self._touches.append((self._clock() + READ_TIMEOUT_S, touch))
        return True

    def _import(self, one: _Read, piece: _Piece) -> str:
        """Makes the blocks of a piece findable and fills them; what was in the way."""
        if not piece.extents:
            return ""
        size, end = self._cache.block_size, piece.extents[-1].end
        token_ids = one.token_ids[: end * size + 1]
        # Before anything is made findable: the blocks before these may have been evicted again.
        if self._cache.num_found(one.request, token_ids) < piece.extents[0].start:
            return "evicted"
        block_ids, state_id = self._cache.take(one.request, token_ids)
        if not (block_ids or state_id):
            return "" if self._cache.num_found(one.request, token_ids) >= end else "no_room"
        first, groups = end - len(block_ids) // self._cache.num_groups, self._store.groups
        for extent, content in zip(piece.extents, piece.contents, strict=True):
            places = groups.places(block_ids, first, extent)
            if places and content:
                self._cache.runner.write_kv_blocks(
                    places, memoryview(content), groups.num_entries(extent) - len(places)
                )
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


def _cancel(readings: Iterable[_Reading]) -> None:
    """Gives up what no thread has begun."""
    for reading in readings:
        reading.piece.cancel()
