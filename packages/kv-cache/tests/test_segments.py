"""Segments from events: what a router knows of a cache is what the cache would find."""

from __future__ import annotations

import random

import pytest

from llmstack_kv_cache import BlockStored, CachedSegments, KVCacheGroup, KVCacheManager
from llmstack_kv_cache.segments import segment_blocks, segment_keys

BLOCK_SIZE = 32
SEGMENT = segment_blocks(BLOCK_SIZE) * BLOCK_SIZE
PROMPTS = [[number] * length for number in (1, 2) for length in (SEGMENT, 3 * SEGMENT + 40)]
PROMPTS += [[1] * (2 * SEGMENT) + [3] * 300, [1] * (SEGMENT + 70) + [4] * 500]
SALTS = ("", "tenant")


def make_manager(kind: str) -> KVCacheManager:
    if kind == "hybrid":
        groups = [KVCacheGroup("full"), KVCacheGroup("window", 64)]
        return KVCacheManager(num_blocks=90, block_size=BLOCK_SIZE, groups=groups)
    return KVCacheManager(num_blocks=45, block_size=BLOCK_SIZE)


def follow(manager: KVCacheManager, segments: CachedSegments) -> None:
    events, num_dropped = manager.fetch_events()
    assert not num_dropped
    for event in events:
        segments.apply(event)


def expected(manager: KVCacheManager) -> set[int]:
    """The segments that a look-up in the cache itself finds, of all prompts that there are."""
    found: set[int] = set()
    for prompt in PROMPTS:
        for salt in SALTS:
            leading, _ = manager._prefix_index.find(prompt, len(prompt) // BLOCK_SIZE, salt)
            found.update(segment_keys(prompt, BLOCK_SIZE, salt)[: len(leading) // segment_blocks(BLOCK_SIZE)])
    return found


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
@pytest.mark.parametrize("seed", range(8))
def test_after_random_schedules_an_index_from_events_equals_the_content_of_the_cache(kind: str, seed: int) -> None:
    rng, manager = random.Random(seed), make_manager(kind)
    manager.start_events(10_000)
    segments, copy, running = CachedSegments(BLOCK_SIZE), set[int](), dict[str, tuple[list[int], str, int]]()
    for number in range(250):
        if rng.random() < 0.5 and len(running) < 4:
            prompt, salt, name = rng.choice(PROMPTS), rng.choice(SALTS), str(number)
            block_ids, num_found = manager.get_computed_blocks(name, prompt, salt)
            if manager.allocate_slots(name, len(prompt), block_ids, salt) is not None:
                running[name] = prompt, salt, num_found
        elif running:
            name = rng.choice(list(running))
            prompt, salt, num_computed = running[name]
            num_computed = min(num_computed + rng.randrange(1, 300), len(prompt))
            manager.cache_blocks(name, prompt, num_computed)
            running[name] = prompt, salt, num_computed
            if num_computed == len(prompt):
                manager.free(name)
                del running[name]
        if rng.random() < 0.02:
            prompt = rng.choice(PROMPTS)
            manager.forget_prefix(prompt, rng.randrange(len(prompt)), rng.choice(SALTS))
        if not running and rng.random() < 0.1:
            manager.reset_prefix_cache()
        follow(manager, segments)
        assert set(segments.keys) == expected(manager)
        was_cleared, added, removed = segments.take()
        copy = (set() if was_cleared else copy).difference(removed).union(added)
        assert copy == set(segments.keys)
    assert manager.stats().num_evictions > 0


def test_who_begins_to_listen_later_gets_what_is_stored_by_then() -> None:
    manager, segments = make_manager("plain"), CachedSegments(BLOCK_SIZE)
    for name, prompt in enumerate(PROMPTS[:3]):
        manager.allocate_slots(str(name), len(prompt), salt=SALTS[name % 2])
        manager.cache_blocks(str(name), prompt, len(prompt))
    manager.start_events(10)
    for event in manager.stored():
        segments.apply(event)
    assert set(segments.keys) == expected(manager) != set()
    assert manager.fetch_events() == ([], 0)


def test_keys_differ_by_salt_and_by_every_token_before() -> None:
    keys = segment_keys([1] * (3 * SEGMENT + 5), BLOCK_SIZE)
    assert len(set(keys)) == len(keys) == 3
    assert segment_keys([1] * (3 * SEGMENT), BLOCK_SIZE, max_segments=2) == keys[:2]
    assert not set(keys) & set(segment_keys([1] * (3 * SEGMENT), BLOCK_SIZE, "tenant"))
    assert not set(keys) & set(segment_keys([2] + [1] * (3 * SEGMENT), BLOCK_SIZE))
    assert segment_keys([1] * (SEGMENT - 1), BLOCK_SIZE) == []


@pytest.mark.parametrize(("block_size", "num_tokens"), [(16, 128), (48, 144), (512, 512), (1, 128)])
def test_a_segment_has_at_least_128_tokens_in_whole_blocks(block_size: int, num_tokens: int) -> None:
    assert segment_blocks(block_size) * block_size == num_tokens


def test_a_log_of_no_events_is_refused() -> None:
    with pytest.raises(ValueError, match="max_events"):
        make_manager("plain").start_events(0)


def test_a_second_listener_keeps_the_events_of_the_first() -> None:
    manager, segments = make_manager("plain"), CachedSegments(BLOCK_SIZE)
    manager.start_events(10)
    manager.allocate_slots("a", SEGMENT)
    manager.cache_blocks("a", PROMPTS[0], SEGMENT)
    manager.start_events(1)
    assert not segments.has_changes
    follow(manager, segments)
    assert segments.has_changes
    assert segments.take() == (False, segment_keys(PROMPTS[0], BLOCK_SIZE), [])
    assert not segments.has_changes


def test_a_cache_that_was_cleared_has_no_segments() -> None:
    manager, segments = make_manager("plain"), CachedSegments(BLOCK_SIZE)
    manager.start_events(10)
    manager.allocate_slots("a", SEGMENT)
    manager.cache_blocks("a", PROMPTS[0], SEGMENT)
    manager.free("a")
    assert manager.reset_prefix_cache()
    follow(manager, segments)
    assert segments.has_changes
    assert segments.take() == (True, [], [])


def test_what_is_stored_of_a_hybrid_cache_tells_the_tokens_of_one_group() -> None:
    manager = make_manager("hybrid")
    manager.allocate_slots("a", SEGMENT)
    manager.cache_blocks("a", PROMPTS[0], SEGMENT)
    stored = list(manager.stored())
    leading = [event for event in stored if isinstance(event, BlockStored)]
    assert sum(len(event.identities) for event in leading) == segment_blocks(BLOCK_SIZE)
    segments = CachedSegments(BLOCK_SIZE)
    for event in stored:
        segments.apply(event)
    assert len(stored) > len(leading)
    assert segments.take()[1] == segment_keys(PROMPTS[0], BLOCK_SIZE)
