"""A cache that is restored from a snapshot answers as the one that it was taken of."""

import inspect
import random

import pytest

from llmstack_kv_cache import KVCacheGroup, KVCacheManager, snapshot
from llmstack_kv_cache.block import BlockTable
from llmstack_kv_cache.block_pool import BlockPool
from llmstack_kv_cache.prefix_index import PrefixIndex, Run
from llmstack_kv_cache.snapshot import num_snapshot_items, restore_snapshot, take_snapshot
from llmstack_kv_cache.state_pool import StatePool
from llmstack_kv_cache.states import RequestStates, StateTable
from llmstack_kv_cache.swap import HostBlockPool

# The configuration, what follows from the rest, and what no later answer depends on.
LEFT_OUT = {
    "block_size", "_block_size", "_enable_prefix_caching", "_watermark", "_groups", "_is_plain", "_leader",
    "_companions", "companions", "_num_bytes", "num_reserved_blocks", "num_blocks", "num_host_blocks", "num_groups",
    "has_windows", "has_states", "_events", "events", "_lookup", "_pool", "num_known_tokens", "group", "state_group",
    "num_cuts",  # a walk of a snapshot has found nothing that is cut
    "sessions", "_order",  # the same as `_ledger`, where there is one
    "turn",  # in the state of the ledger
    "parent",  # follows from the keys of runs
    "taker",  # of blocks that are taken next
}  # fmt: skip


def plain(num_blocks=40):
    return KVCacheManager(num_blocks, 4, num_host_blocks=20)


def hybrid(num_blocks=60):
    groups = [KVCacheGroup("window", 6), KVCacheGroup("full")]
    return KVCacheManager(num_blocks, 4, num_host_blocks=30, groups=groups)


def stateful(num_blocks=40):
    return KVCacheManager(num_blocks, 4, num_host_blocks=20, num_state_blocks=12)


def hybrid_stateful(num_blocks=60):
    groups = [KVCacheGroup("window", 6), KVCacheGroup("full")]
    return KVCacheManager(num_blocks, 4, groups=groups, num_state_blocks=12, num_host_blocks=30)


def answers(cache, rng, num_calls, names=("a", "b", "c", "d", "e"), most_tokens=20):
    """What a cache answers to random calls, and the requests that are swapped out."""
    found = []
    for _ in range(num_calls):
        name = rng.choice(names)
        token_ids = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(1, 8)] + [rng.randrange(3)] * rng.randint(1, most_tokens)
        kind = rng.randrange(6)
        try:
            if kind < 3:
                blocks, num_tokens = cache.get_computed_blocks(name, token_ids)
                found.append((blocks, num_tokens, cache.allocate_slots(name, len(token_ids), blocks)))
                found.append(cache.advance_state(name, len(token_ids)))
                cache.cache_blocks(name, token_ids, len(token_ids))
                cache.end_step()
            elif kind == 3:
                found.append(cache.swap_out(name))
            elif kind == 4:
                found.append(cache.swap_in(name))
            else:
                cache.free(name)
        except (KeyError, ValueError) as error:
            found.append(type(error).__name__)
    return [*found, cache.stats()]


@pytest.mark.parametrize("make", [plain, hybrid, stateful, hybrid_stateful])
@pytest.mark.parametrize(("num_blocks", "most_tokens"), [(60, 20), (180, 60)])  # the collectors alone, and more
def test_a_restored_cache_gives_the_same_answers(make, num_blocks, most_tokens):
    num_segments = set()
    for seed in range(20):
        rng, cache = random.Random(seed), make(num_blocks)
        answers(cache, rng, 60, most_tokens=most_tokens)
        state, restored = take_snapshot(cache), make(num_blocks)
        num_segments.add(len(state["segments"]))
        assert num_snapshot_items(cache) > 0
        restore_snapshot(restored, state)
        assert take_snapshot(restored) == state
        one, other = (answers(one, random.Random(seed), 60, most_tokens=most_tokens) for one in (cache, restored))
        assert one == other
        assert take_snapshot(restored) == take_snapshot(cache) != state
    num_collectors = 2 if make in (hybrid, hybrid_stateful) else 1
    assert (max(num_segments) > num_collectors) == (most_tokens > 20)


def test_a_table_goes_on_after_a_prefix_that_is_forgotten():
    token_ids = list(range(1, 18))
    cache, restored = plain(), plain()
    cache.allocate_slots("a", 8)
    cache.cache_blocks("a", token_ids, 8)
    cache.forget_prefix(token_ids, 0)
    restore_snapshot(restored, take_snapshot(cache))
    found = []
    for one in (cache, restored):
        one.allocate_slots("a", 16)
        one.cache_blocks("a", token_ids, 16)
        one.allocate_slots("b", 16)
        one.cache_blocks("b", token_ids, 16)
        found.append((one.get_computed_blocks("c", token_ids), take_snapshot(one)))
    assert found[0] == found[1]
    assert found[0][0][1] == 16


def test_a_snapshot_of_another_cache_is_refused():
    state = take_snapshot(plain())
    with pytest.raises(ValueError, match="has 40 blocks, the cache 41"):
        restore_snapshot(plain(41), state)
    with pytest.raises(ValueError, match="has 11 state blocks, the cache 13"):
        restore_snapshot(KVCacheManager(40, 4, num_state_blocks=14), take_snapshot(stateful()))
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


@pytest.mark.parametrize("cls", [KVCacheManager, BlockPool, PrefixIndex, HostBlockPool, Run, BlockTable])
def test_every_attribute_is_part_of_a_snapshot_or_left_out_on_purpose(cls):
    cache = hybrid_stateful()
    instances = {
        BlockPool: cache._pool, PrefixIndex: cache._prefix_index, HostBlockPool: cache._host_pool,
    }  # fmt: skip
    slots = [name for one in cls.__mro__ for name in getattr(one, "__slots__", ())]
    names = set(slots or vars(instances.get(cls, cache)))
    source = inspect.getsource(snapshot)
    assert {name for name in names if name not in LEFT_OUT and f".{name}" not in source} == set()


@pytest.mark.parametrize("cls", [RequestStates, StateTable, StatePool])
def test_every_attribute_of_states_is_part_of_a_snapshot_or_left_out_on_purpose(cls):
    cache = stateful()
    left_out = {
        "_pending",  # what the step being made writes
        "_identity_to_block",  # follows from its inverse
        "_index",
        "_block_size",
        "current",
        "previous",  # both in `states`
    }
    names = set(
        StateTable.__slots__
        if cls is StateTable
        else vars(cache._states if cls is RequestStates else cache._states.pool)
    )
    source = inspect.getsource(StatePool.snapshot) if cls is StatePool else inspect.getsource(snapshot)
    assert {name for name in names - left_out if f".{name}" not in source} == set()
