"""Prefixes that are read in turns: no tenant's sessions hold up the requests of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_core.disk_cache import prefix_reads
from llmstack_engine_core.disk_cache.file_groups import ONE_GROUP, Extent
from llmstack_engine_core.disk_cache.prefix_reads import PrefixReads, Turns
from llmstack_engine_core.disk_cache.prefix_writes import Cache
from llmstack_types import EngineCoreRequest, PrefixMedia, SamplingParams

BLOCK_SIZE, NUM_BLOCKS = 16, 12


class OnDisk:
    """A store that has every prefix in files of one block; a scheduler and a runner that take them."""

    groups = ONE_GROUP
    has_states = needs_end = False
    bytes_per_block = 24
    bytes_per_state = 0

    def __init__(self) -> None:
        self.order: list[str] = []
        self.go = threading.Event()
        self.now_s = 0.0
        self._num_known: dict[int, int] = {}

    def chain(self, request: EngineCoreRequest, token_ids: list[int]) -> str:
        return request.request_id

    def find(self, chain: str, max_blocks: int) -> int:
        return max_blocks

    def extents(self, start: int, end: int) -> list[Extent]:
        return [Extent(place, place + 1) for place in range(start, end)]

    def stored(self, chain: str, extent: Extent) -> Extent:
        return extent

    def num_bytes(self, extents: list[Extent]) -> int:
        return len(extents) * self.bytes_per_block + self.bytes_per_state

    def read(self, chain: str, extent: Extent) -> bytearray:
        self.go.wait(10.0)
        self.order.append(chain)
        return bytearray(b"x")

    def touch(self, chain: str, end: int) -> None:
        pass

    def cached_prefix(self, token_ids: list[int], salt: str, media: PrefixMedia) -> tuple[list[int], int]:
        return list(range(self._num_known.get(token_ids[0], 0))), 0

    def import_prefix(self, token_ids: list[int], salt: str, media: PrefixMedia) -> tuple[list[int], int]:
        known, end = self._num_known.get(token_ids[0], 0), (len(token_ids) - 1) // BLOCK_SIZE
        self._num_known[token_ids[0]] = end
        return list(range(known, end)), 0

    def write_kv_blocks(self, block_ids: list[int], content: memoryview, start: int, state_id: int = 0) -> None:
        assert len(block_ids) == 1


@pytest.fixture
def disk() -> OnDisk:
    return OnDisk()


@pytest.fixture
def reads(disk: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefixReads]:
    monkeypatch.setattr(prefix_reads, "MAX_NUM_READING", 1)
    monkeypatch.setattr(prefix_reads, "_PIECE_BYTES", 1)  # each file is a piece
    made = PrefixReads(Cache(disk, disk, BLOCK_SIZE), disk, lambda: disk.now_s)
    yield made
    disk.go.set()
    made.close()


def begin(reads: PrefixReads, number: int, tenant: str) -> None:
    token_ids = [number] * (NUM_BLOCKS * BLOCK_SIZE + 1)
    request = EngineCoreRequest(f"{tenant}-{number}", token_ids, SamplingParams(), tenant=tenant)
    assert reads.begin(request, token_ids)


def test_pieces_of_tenants_are_read_in_turns(reads: PrefixReads, disk: OnDisk):
    for number in range(4):
        begin(reads, number, "busy")
    begin(reads, 70, "quiet")
    disk.go.set()
    ready: list[str] = []
    while len(reads):
        ready += [request.request_id for request in reads.take_ready(10.0)]
    assert ready == ["busy-0", "quiet-70", "busy-1", "busy-2", "busy-3"]
    assert disk.order[:5] == ["busy-0", "quiet-70", "busy-0", "quiet-70", "busy-0"]
    assert reads.num_tokens == 5 * NUM_BLOCKS * BLOCK_SIZE
    assert not reads.misses


def test_the_first_request_of_a_tenant_has_all_threads(disk: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_reads, "_PIECE_BYTES", 1)
    reads = PrefixReads(Cache(disk, disk, BLOCK_SIZE), disk, lambda: disk.now_s)
    for number in range(3):
        begin(reads, number, "busy")
    assert [len(one.readings) for one in reads._reads.values()] == [prefix_reads.MAX_NUM_READING, 0, 0]
    begin(reads, 70, "quiet")
    disk.go.set()
    ready: list[str] = []
    while len(reads):
        ready += [request.request_id for request in reads.take_ready(10.0)]
    assert [one for one in ready if one.startswith("busy")] == ["busy-0", "busy-1", "busy-2"]
    assert reads.num_tokens == 4 * NUM_BLOCKS * BLOCK_SIZE
    assert not reads.misses
    reads.close()


def test_what_was_read_behind_a_slow_piece_is_bounded(disk: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_reads, "_PIECE_BYTES", 1)
    read = disk.read
    monkeypatch.setattr(disk, "read", lambda chain, extent: bytearray(b"x") if extent.start else read(chain, extent))
    reads = PrefixReads(Cache(disk, disk, BLOCK_SIZE), disk, lambda: disk.now_s)
    begin(reads, 0, "busy")
    for _ in range(5):
        assert reads.take_ready(0.01) == []
        assert [len(one.readings) for one in reads._reads.values()] == [2]
    disk.go.set()
    ready = []
    while len(reads):
        ready += reads.take_ready(10.0)
    assert [one.request_id for one in ready] == ["busy-0"]
    assert reads.num_tokens == NUM_BLOCKS * BLOCK_SIZE
    reads.close()


def test_a_disk_that_hangs_delays_all_requests_once(reads: PrefixReads, disk: OnDisk):
    for number in range(4):
        begin(reads, number, "busy")
    begin(reads, 70, "quiet")
    assert reads.take_ready(0.0) == []
    disk.now_s += prefix_reads.READ_TIMEOUT_S
    assert [one.request_id for one in reads.take_ready(0.0)] == ["busy-0", "busy-1", "busy-2", "busy-3", "quiet-70"]
    token_ids = [9] * (NUM_BLOCKS * BLOCK_SIZE + 1)
    assert not reads.begin(EngineCoreRequest("r", token_ids, SamplingParams()), token_ids)
    assert (len(reads), dict(reads.misses)) == (0, {"late": 6})
    disk.go.set()
    while reads.is_stuck:
        pass
    begin(reads, 10, "busy")
    while len(reads):
        reads.take_ready(10.0)
    assert reads.num_tokens == NUM_BLOCKS * BLOCK_SIZE


@pytest.mark.parametrize(("more", "is_read"), [(0, True), (1, False)])
def test_what_takes_more_bytes_than_it_saves_is_computed(reads: PrefixReads, disk: OnDisk, more: int, is_read: bool):
    """A state costs the same behind any number of tokens."""
    num_tokens = NUM_BLOCKS * BLOCK_SIZE
    disk.bytes_per_state = num_tokens * prefix_reads.MAX_TOKEN_BYTES - NUM_BLOCKS * disk.bytes_per_block + more
    token_ids = [1] * (num_tokens + 1)
    disk.go.set()
    assert reads.begin(EngineCoreRequest("r", token_ids, SamplingParams()), token_ids) == is_read
    assert dict(reads.misses) == ({} if is_read else {"costly": 1})


@given(st.lists(st.lists(st.sampled_from("abcd"), min_size=1), max_size=30))
def test_who_waits_has_a_turn_before_others_have_two(waiting: list[list[str]]):
    turns, last = Turns(), dict.fromkeys("abcd", -1)
    for number, tenants in enumerate(waiting):
        tenant = turns.take(tenants)
        assert tenant in tenants
        assert last[tenant] == min(last[one] for one in tenants)
        last[tenant] = number


def test_a_disk_that_hangs_holds_up_nothing_after_its_readers_have_left(reads: PrefixReads, disk: OnDisk):
    begin(reads, 0, "gone")
    reads.forget(["gone-0"])
    begin(reads, 1, "busy")
    begun_s = time.monotonic()
    assert reads.take_ready(0.05) == []
    assert time.monotonic() - begun_s >= 0.05, "an idle engine core does not turn round meanwhile"
    disk.now_s += prefix_reads.READ_TIMEOUT_S
    assert [one.request_id for one in reads.take_ready(0.0)] == ["busy-1"]
    assert dict(reads.misses) == {"late": 1}


def test_a_disk_that_hangs_after_a_prefix_was_read_delays_requests_once(
    reads: PrefixReads, disk: Any, monkeypatch: pytest.MonkeyPatch
):
    disk.go.set()
    is_back = threading.Event()
    monkeypatch.setattr(disk, "touch", lambda chain, end: is_back.wait(10.0))
    begin(reads, 0, "busy")
    while len(reads):
        reads.take_ready(10.0)
    for number in (1, 2):
        begin(reads, number, "busy")
    disk.now_s += prefix_reads.READ_TIMEOUT_S
    assert [one.request_id for one in reads.take_ready(0.0)] == ["busy-1", "busy-2"]
    is_back.set()
    while reads.is_stuck:
        pass
    begin(reads, 3, "busy")


@pytest.mark.parametrize(("num_mib", "num_pieces"), [(16, 1), (160, 10), (640, 16), (6400, 100)])
def test_pieces_are_few_and_never_large(disk: Any, num_mib: int, num_pieces: int):
    disk.bytes_per_block = 1 << 20
    reads = PrefixReads(Cache(disk, disk, BLOCK_SIZE), disk, lambda: disk.now_s)
    pieces = reads._pieces(disk.extents(0, num_mib))
    assert len(pieces) == num_pieces
    assert [extent for piece in pieces for extent in piece] == disk.extents(0, num_mib)
    reads.close()
