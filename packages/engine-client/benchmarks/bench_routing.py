"""Exact routing: the memory of the index, and what choices and updates cost."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_engine_client.routing import Router, RoutingIndex, RoutingPolicy
from llmstack_engine_client.routing.index import MAX_SEGMENTS
from llmstack_engine_core.messages.protocol import ENGINE_MESSAGES, CacheUpdate
from llmstack_kv_cache import CachedSegments, KVCacheManager, segment_keys
from llmstack_kv_cache.segments import pack_keys

BLOCK_SIZE = 16


def random_keys(num_segments: int) -> bytes:
    return pack_keys([random.getrandbits(64) for _ in range(num_segments)])


@pytest.mark.parametrize("num_tokens", [500, 12_000])
@pytest.mark.parametrize("num_replicas", [2, 64])
def test_choice(benchmark: BenchmarkFixture, num_replicas: int, num_tokens: int) -> None:
    prompt = [random.randrange(30_000) for _ in range(num_tokens)]
    router, keys = Router(num_replicas, RoutingPolicy.EXACT), segment_keys(prompt, BLOCK_SIZE)
    router.set_block_size(BLOCK_SIZE)
    for replica in range(num_replicas):
        router.apply(replica, CacheUpdate(0, True, pack_keys(keys[: random.randrange(len(keys))])))

    def choose() -> None:
        router.route("r", prompt, "", [0] * num_replicas)
        router.end("r")

    benchmark(choose)


def test_update(benchmark: BenchmarkFixture) -> None:
    index, number = RoutingIndex(1), 0
    index.apply(0, CacheUpdate(0, True))

    def apply() -> None:
        nonlocal number
        number += 1
        assert index.apply(
            0, ENGINE_MESSAGES.decode(ENGINE_MESSAGES.encode(CacheUpdate(number, False, random_keys(16))))[1]
        )  # type: ignore[arg-type]

    benchmark(apply)


@pytest.mark.parametrize("num_replicas", [2, 64])
def test_memory_of_a_full_index(benchmark: BenchmarkFixture, num_replicas: int) -> None:
    updates = [CacheUpdate(0, True, random_keys(MAX_SEGMENTS // num_replicas)) for _ in range(num_replicas)]
    tracemalloc.start()
    index = RoutingIndex(num_replicas)
    for replica, update in enumerate(updates):
        index.apply(replica, update)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) <= MAX_SEGMENTS
    benchmark.extra_info["mib"] = round(num_bytes / 2**20, 1)
    benchmark.pedantic(index.clear, args=(0,), rounds=1)


@pytest.mark.parametrize("has_followers", [False, True])
def test_blocks_stored(benchmark: BenchmarkFixture, has_followers: bool) -> None:
    manager, segments = KVCacheManager(62_500, BLOCK_SIZE), CachedSegments(BLOCK_SIZE)
    if has_followers:
        manager.start_events(65_536)

    def store() -> None:
        prompt = [random.randrange(30_000), *range(11_999)]
        manager.allocate_slots("r", 12_000)
        manager.cache_blocks("r", prompt, 12_000)
        for event in manager.fetch_events()[0]:
            segments.apply(event)
        segments.take()
        manager.free("r")

    benchmark(store)
