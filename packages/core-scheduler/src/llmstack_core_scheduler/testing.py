"""For tests and simulations: a KV-cache manager and a model runner in plain Python, and a conformance check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_types import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput


class FakeKVCacheManager:
    """A KV-cache manager that is slow and plain: whole prefixes as keys, a list for the order of eviction."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._free = list(range(num_blocks))
        self._tables: dict[str, list[int]] = {}
        self._salts: dict[str, str] = {}
        self._prefix_to_block_id: dict[tuple[str, tuple[int, ...]], int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks in no table."""
        return len(self._free)

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str = "") -> tuple[list[int], int]:
        """The longest cached prefix, in whole blocks and never all tokens."""
        block_ids: list[int] = []
        for end in range(self.block_size, len(token_ids), self.block_size):
            block_id = self._prefix_to_block_id.get((salt, tuple(token_ids[:end])))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids, len(block_ids) * self.block_size

    def allocate_slots(
        self, request_id: str, num_tokens: int, computed_block_ids: Sequence[int] = (), salt: str = ""
    ) -> list[int] | None:
        """The blocks appended to the request's table, or None."""
        table = self._tables.get(request_id, [])
        num_new_blocks = -(-num_tokens // self.block_size) - len(table) - len(computed_block_ids)
        available = [block_id for block_id in self._free if block_id not in computed_block_ids]
        if num_new_blocks > len(available):
            return None
        new_block_ids = available[: max(num_new_blocks, 0)]
        self._forget(new_block_ids)
        appended = [*computed_block_ids, *new_block_ids]
        self._free = [block_id for block_id in self._free if block_id not in appended]
        self._tables[request_id] = table + appended
        self._salts.setdefault(request_id, salt)
        return appended

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the full blocks below `num_computed_tokens` findable."""
        for index in range(num_computed_tokens // self.block_size):
            prefix = self._salts[request_id], tuple(token_ids[: (index + 1) * self.block_size])
            self._prefix_to_block_id.setdefault(prefix, self._tables[request_id][index])

    def free(self, request_id: str) -> None:
        """Drops the request's references, last block first."""
        table = self._tables.pop(request_id, [])
        self._salts.pop(request_id, None)
        held = {block_id for other in self._tables.values() for block_id in other}
        self._free += [block_id for block_id in reversed(table) if block_id not in held]

    def reset_prefix_cache(self) -> bool:
        """Forgets every prefix, unless a request holds blocks."""
        if self._tables:
            return False
        self._prefix_to_block_id.clear()
        return True

    def _forget(self, block_ids: list[int]) -> None:
        self._prefix_to_block_id = {
            prefix: block_id for prefix, block_id in self._prefix_to_block_id.items() if block_id not in block_ids
        }


def next_token(token_ids: Sequence[int], vocab_size: int = 1000) -> int:
    """The token that the fake model puts after these: a fixed function of all of them, equal on every machine."""
    return _token_of(_digests(token_ids)[-1], vocab_size)


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    digests: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class WrongKVError(Exception):
    """A row would have read, through its block table, KV that is not its own prefix; or a row's books are wrong."""


class FakeModelRunner:
    """A model runner whose KV cache holds, in each slot, a digest of the prefix that was written there.

    Before a row samples, everything it would attend to is compared with its own tokens, so that a wrong block table or
    a wrong prefix hit is found in the step in which it would spoil an answer. The tokens are those of `next_token`.

    Args:
        num_blocks: Blocks of the cache.
        block_size: Tokens per block.
        vocab_size: Sampled tokens lie in [0, vocab_size).
        choose_token: Replaces what the fake model says: request id and the tokens so far to the next token.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 1000,
        choose_token: Callable[[str, Sequence[int]], int] | None = None,
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._choose_token = choose_token
        self._slots: list[int | None] = [None] * (num_blocks * block_size)
        self._rows: dict[str, _Row] = {}

    @property
    def request_ids(self) -> list[str]:
        """The requests it has rows for."""
        return list(self._rows)

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step.

        Raises:
            WrongKVError: The step would compute nonsense.
        """
        for request_id in scheduled.removed_request_ids:
            del self._rows[request_id]
        for request in scheduled.new_requests:
            self._add(request)
        for row in scheduled.scheduled_requests:
            self._write(row)
        sampled = [self._attend_and_sample(row) for row in scheduled.scheduled_requests]
        return ModelRunnerOutput([row.request_id for row in scheduled.scheduled_requests], sampled)

    def _add(self, request: NewRequest) -> None:
        if request.request_id in self._rows:
            raise WrongKVError(f"{request.request_id} has a row already")
        self._rows[request.request_id] = _Row(request.token_ids, _digests(request.token_ids))

    def _write(self, scheduled: ScheduledRequest) -> None:
        row = self._rows[scheduled.request_id]
        row.block_ids += scheduled.new_block_ids
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        if scheduled.num_scheduled_tokens < 1 or end > len(row.token_ids):
            raise WrongKVError(f"{scheduled.request_id} computes up to {end} of {len(row.token_ids)} tokens")
        for position in range(scheduled.num_computed_tokens, end):
            self._slots[self._slot(row, position)] = row.digests[position]

    def _attend_and_sample(self, scheduled: ScheduledRequest) -> list[int]:
        row = self._rows[scheduled.request_id]
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        for position in range(end):
            if self._slots[self._slot(row, position)] != row.digests[position]:
                raise WrongKVError(f"{scheduled.request_id} would read something else at position {position}")
        if end < len(row.token_ids):
            return []
        token_id = _token_of(row.digests[-1], self._vocab_size)
        if self._choose_token is not None:
            token_id = self._choose_token(scheduled.request_id, row.token_ids)
        row.token_ids.append(token_id)
        row.digests.append(_digest(row.digests[-1], token_id))
        return [token_id]

    def _slot(self, row: _Row, position: int) -> int:
        return row.block_ids[position // self._block_size] * self._block_size + position % self._block_size


class DecisionHash:
    """A running hash over steps: equal hashes mean equal decisions, on any machine."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, scheduled: SchedulerOutput) -> None:
        """Takes in one step."""
        rows = [
            (row.request_id, row.num_computed_tokens, row.num_scheduled_tokens, row.new_block_ids)
            for row in scheduled.scheduled_requests
        ]
        new = [(request.request_id, request.token_ids) for request in scheduled.new_requests]
        self._hash.update(repr((scheduled.step, new, rows, scheduled.removed_request_ids)).encode())

    def hexdigest(self) -> str:
        """The hash of all steps so far."""
        return self._hash.hexdigest()


def check_kv_cache_manager(factory: Callable[[int, int], KVCacheManager]) -> None:
    """Checks what the scheduler relies on; `factory` takes the number of blocks and the block size.

    Raises:
        AssertionError: The manager is not one; the text says what it did.
    """
    _check_allocation(factory(4, 2))
    _check_refusal(factory(4, 2))
    _check_prefix_hits(factory(8, 2))
    _check_reset(factory(4, 2))


def _check_allocation(manager: KVCacheManager) -> None:
    _expect("num_blocks, block_size", (manager.num_blocks, manager.block_size), (4, 2))
    first = manager.allocate_slots("a", 3)
    _expect("blocks for 3 tokens of 2 per block", len(set(first or ())), 2)
    _expect("block ids in range", [b for b in first or () if not 0 <= b < 4], [])
    _expect("blocks for a slot that is there", manager.allocate_slots("a", 4), [])
    second = manager.allocate_slots("a", 5) or []
    _expect("one more block at the border", len(set(second) - set(first or ())), 1)
    _expect("free blocks", manager.num_free_blocks, 1)
    manager.free("a")
    manager.free("a")
    _expect("free blocks after free, twice", manager.num_free_blocks, 4)


def _check_refusal(manager: KVCacheManager) -> None:
    manager.allocate_slots("a", 5)
    _expect("None for a new request without room", manager.allocate_slots("b", 3), None)
    _expect("None for a known request without room", manager.allocate_slots("a", 9), None)
    _expect("free blocks after a refusal", manager.num_free_blocks, 1)
    _expect("room for what is left", len(manager.allocate_slots("b", 2) or ()), 1)


def _check_prefix_hits(manager: KVCacheManager) -> None:
    token_ids = [1, 2, 3, 4, 5, 6]
    table = manager.allocate_slots("a", 6, salt="s") or []
    manager.cache_blocks("a", token_ids, 6)
    _expect("hit of a running request", manager.get_computed_blocks("b", [*token_ids, 7], "s"), (table, 6))
    _expect("never all tokens", manager.get_computed_blocks("b", token_ids, "s"), (table[:2], 4))
    _expect("other salt", manager.get_computed_blocks("b", token_ids, "t"), ([], 0))
    _expect("other tokens", manager.get_computed_blocks("b", [1, 2, 9, 4, 5, 6], "s"), (table[:1], 2))
    shared = manager.allocate_slots("b", 6, table[:2], "s") or []
    _expect("shared blocks are the head of the answer", shared[:2], table[:2])
    _expect("free blocks, two of them shared", manager.num_free_blocks, 4)
    manager.free("a")
    _expect("shared blocks are still held", manager.num_free_blocks, 5)
    manager.free("b")
    _expect("hit of a finished request", manager.get_computed_blocks("c", [*token_ids, 7], "s")[1], 6)


def _check_reset(manager: KVCacheManager) -> None:
    manager.allocate_slots("a", 2)
    manager.cache_blocks("a", [1, 2], 2)
    _expect("no reset while a request holds blocks", manager.reset_prefix_cache(), False)
    manager.free("a")
    _expect("reset", manager.reset_prefix_cache(), True)
    _expect("nothing found after it", manager.get_computed_blocks("b", [1, 2, 3]), ([], 0))


def _expect(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise AssertionError(f"{what}: expected {expected!r}, got {actual!r}")


def _digest(previous: int, token_id: int) -> int:
    packed = previous.to_bytes(8, "little") + token_id.to_bytes(8, "little", signed=True)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def _digests(token_ids: Sequence[int]) -> list[int]:
    """A digest of the prefix that ends with each token."""
    digests, digest = [], 0
    for token_id in token_ids:
        digest = _digest(digest, token_id)
        digests.append(digest)
    return digests


def _token_of(digest: int, vocab_size: int) -> int:
    return digest % vocab_size
