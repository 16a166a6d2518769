"""Texts that wait to be written: tenants in turns, and none who pushes out the texts of others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_core.disk_cache import prefix_writes
from llmstack_engine_core.disk_cache.block_files import BlockFiles
from llmstack_engine_core.disk_cache.prefix_store import PrefixStore
from llmstack_engine_core.disk_cache.prefix_writes import Cache, PrefixWrites
from llmstack_engine_core.kv_transfer.tag import TagMaker
from llmstack_types import EngineCoreRequest, EngineReady, PrefixMedia, SamplingParams

BLOCK_SIZE, BLOCK_BYTES = 4, 24
READY = EngineReady(64, BLOCK_SIZE, 64, 97, "float32", "cpu", numeric_contract_id="c0", kv_cache_dtype="float32")


class EverythingCached:
    """A scheduler and a runner that have every block, and note whose they are asked for.

    Attributes:
        num_asked: Blocks whose contents were asked for.
        lost: Blocks that hold something else by now.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.read: list[int] = []
        self.num_asked = 0
        self.lost: set[int] = set()

    def cached_prefix(self, token_ids: list[int], salt: str, media: PrefixMedia) -> tuple[list[int], int]:
        self.asked.append(token_ids[0])
        return list(range((len(token_ids) - 1) // BLOCK_SIZE)), 0

    def contents(self, block_ids: list[int]) -> list[int]:
        self.num_asked += len(block_ids)
        return [0 if block_id in self.lost else block_id + 1 for block_id in block_ids]

    def read_kv_blocks(self, block_ids: list[int], out: memoryview, state_id: int = 0) -> None:
        self.read += block_ids
        out[:] = bytes(len(out))


@pytest.fixture
def cached() -> EverythingCached:
    return EverythingCached()


@pytest.fixture
def writes(tmp_path: Path, cached: Any) -> Iterator[PrefixWrites]:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    files = BlockFiles(folder, os.dup(folder), 1 << 20)
    store = PrefixStore(files, bytes(32), TagMaker(READY, BLOCK_BYTES))
    made = PrefixWrites(Cache(cached, cached, BLOCK_SIZE), store, lambda: 0.0)
    yield made
    made.finish(5.0)
    files.close()


def request_of(tenant: str) -> EngineCoreRequest:
    return EngineCoreRequest("r", [1], SamplingParams(), tenant=tenant)


def test_tenants_are_written_in_turns(writes: PrefixWrites, cached: EverythingCached):
    for number in range(40):
        writes.add(request_of("busy"), [number] * 9)
    for number in (70, 71):
        writes.add(request_of("quiet"), [number] * 9)
    writes.finish(5.0)
    assert len(cached.asked) == 42
    assert cached.asked[:5] == [0, 70, 1, 71, 2]


@given(tenants=st.lists(st.sampled_from("abc"), max_size=40), limit=st.integers(1, 12))
def test_who_has_most_texts_gives_one_up(tenants: list[str], limit: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_writes, "MAX_NUM_JOBS", limit)
        jobs = prefix_writes._Jobs()
        waiting: dict[str, list[int]] = {}
        for number, tenant in enumerate(tenants):
            jobs.add(prefix_writes._Job(request_of(tenant), [number]))
            waiting.setdefault(tenant, []).append(number)
            if sum(map(len, waiting.values())) > limit:
                most = max(map(len, waiting.values()))
                assert most * len(waiting) > limit
            before = {one: list(numbers) for one, numbers in waiting.items()}
            waiting = {one: [job.token_ids[0] for job in kept] for one, kept in jobs._tenant_to_jobs.items()}
            for one, numbers in before.items():
                kept = waiting.get(one, [])
                assert kept == numbers[len(numbers) - len(kept) :], "the oldest go"
                assert len(numbers) - len(kept) <= (len(numbers) * len(before) > limit)
            assert len(jobs) == sum(map(len, waiting.values())) <= limit
        order = []
        while len(jobs):
            order.append(jobs.next.request.tenant)
            jobs.end()
        assert sorted(order) == sorted(one for one, numbers in waiting.items() for _ in numbers)
        for place in range(1, len(order)):
            assert order[place] != order[place - 1] or len({*order[place:]}) == 1


@pytest.mark.parametrize("num_blocks", [64, 640])
def test_a_text_is_looked_up_once_whatever_its_length(writes: PrefixWrites, cached: EverythingCached, num_blocks: int):
    for _ in range(2):  # the second time all of it is there
        writes.add(request_of("a"), list(range(num_blocks * BLOCK_SIZE + 1)))
        while writes.has_jobs:
            writes.copy()
    writes.behind.close(5.0)
    assert cached.asked == [0, 0]
    assert cached.read == list(range(num_blocks))
    assert cached.num_asked == 3 * num_blocks


def test_what_is_on_disk_is_passed_in_bounded_parts(writes: PrefixWrites, cached: EverythingCached):
    num_blocks = 20 * prefix_writes.MAX_NUM_KNOWN
    for _ in range(2):
        writes.add(request_of("a"), list(range(num_blocks * BLOCK_SIZE + 1)))
        num_calls = 0
        while writes.has_jobs:
            writes.copy()
            num_calls += 1
    assert num_calls == -(-num_blocks // (8 * prefix_writes.MAX_NUM_KNOWN))


def test_a_block_that_is_lost_ends_its_text_and_no_other(writes: PrefixWrites, cached: EverythingCached):
    for tenant in ("a", "b"):
        writes.add(request_of(tenant), list(range(32 * BLOCK_SIZE + 1)))
    writes.copy()
    cached.lost = {12}
    writes.copy()
    assert cached.read == list(range(8))
    cached.lost = set()
    while writes.has_jobs:
        writes.copy()
    assert cached.read == list(range(32)), "what was written is there for both"
