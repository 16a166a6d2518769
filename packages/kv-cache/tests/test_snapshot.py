"""A cache that is restored from a snapshot answers as the one that it was taken of."""

import inspect
import random

import pytest

from llmstack_kv_cache import HybridKVCacheManager, KVCacheGroup, KVCacheManager, snapshot
from llmstack_kv_cache.block_pool import BlockPool
from llmstack_kv_cache.groups import GroupTable
from llmstack_kv_cache.prefix_index import PrefixIndex, Run
from llmstack_kv_cache.snapshot import num_snapshot_items, restore_snapshot, take_snapshot
from llmstack_kv_cache.swap import HostBlockPool

# The configuration, what follows from the rest, and what no later answer depends on.
LEFT_OUT = {
    "_block_size", "_enable_prefix_caching", "_watermark", "_groups", "_leader", "_num_bytes", "num_reserved_blocks",
    "num_blocks", "num_host_blocks", "_events", "events", "_last_lookup", "_found", "_pool",
}  # fmt: skip


def plain(num_blocks=40):
    return KVCacheManager(num_blocks, 4, num_host_blocks=20)


def hybrid(num_blocks=60):
    groups = [KVCacheGroup("window", 6), KVCacheGroup("full")]
    return HybridKVCacheManager(groups, num_blocks, 4, num_host_blocks=30)


def answers(cache, rng, num_calls, names=("a", "b", "c", "d", "e")):
    """What a cache answers to random calls, and the requests that are swapped out."""
    found = []
    for _ in range(num_calls):
        name = rng.choice(names)
        token_ids = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(1, 8)] + [rng.randrange(3)] * rng.randint(1, 20)
        kind = rng.randrange(6)
        try:
            if kind < 3:
                blocks, num_tokens = cache.get_computed_blocks(name, token_ids)
                found.append((blocks, num_tokens, cache.allocate_slots(name, len(token_ids), blocks)))
                cache.cache_blocks(name, token_ids, len(token_ids))
            elif kind == 3:
                found.append(cache.swap_out(name))
            elif kind == 4:
                found.append(cache.swap_in(name))
            else:
                cache.free(name)
        except (KeyError, ValueError) as error:
            found.append(type(error).__name__)
    return [*found, cache.stats()]


@pytest.mark.parametrize("make", [plain, hybrid])
def test_a_restored_cache_gives_the_same_answers(make):
    for seed in range(20):
        rng, cache = random.Random(seed), make()
        answers(cache, rng, 60)
        state, restored = take_snapshot(cache), make()
        assert num_snapshot_items(cache) > 0
        restore_snapshot(restored, state)
        assert take_snapshot(restored) == state
        assert answers(cache, random.Random(seed), 60) == answers(restored, random.Random(seed), 60)
        assert take_snapshot(restored) == take_snapshot(cache) != state


def test_a_snapshot_of_another_cache_is_refused():
    state = take_snapshot(plain())
    with pytest.raises(ValueError, match="has 40 blocks, the cache 41"):
        restore_snapshot(plain(41), state)
    del state["runs"]
    with pytest.raises(ValueError, match="no snapshot of a cache"):
        restore_snapshot(plain(), state)


def test_books_that_do_not_agree_are_refused():
    cache = plain()
    cache.allocate_slots("a", 10)
    state = take_snapshot(cache)
    state["unfindable"].pop()
    with pytest.raises(ValueError, match="the free blocks"):
        restore_snapshot(plain(), state)


@pytest.mark.parametrize(
    "cls", [KVCacheManager, HybridKVCacheManager, BlockPool, PrefixIndex, HostBlockPool, Run, GroupTable]
)
def test_every_attribute_is_part_of_a_snapshot_or_left_out_on_purpose(cls):
    cache = plain() if cls is KVCacheManager else hybrid()
    instances = {
        BlockPool: cache._pool, PrefixIndex: cache._prefix_index, HostBlockPool: cache._host_pool,
    }  # fmt: skip
    slots = [name for one in cls.__mro__ for name in getattr(one, "__slots__", ())]
    names = set(slots or vars(instances.get(cls, cache)))
    source = inspect.getsource(snapshot)
    assert {name for name in names if name not in LEFT_OUT and f".{name}" not in source} == set()
