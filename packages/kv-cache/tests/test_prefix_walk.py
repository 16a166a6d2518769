"""A lookup in pieces finds what a lookup at once finds, whatever comes and goes in the meantime."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_kv_cache import KVCacheGroup, KVCacheManager
from llmstack_kv_cache.prefix_index import PrefixIndex
from llmstack_kv_cache.snapshot import num_snapshot_items, restore_snapshot, take_snapshot

NAMES = ("a", "b", "c")
PROMPTS = [[*range(start), 7, *range(start, 40)] for start in (0, 5, 17, 30, 40)]


def make(num_blocks=30):
    return KVCacheManager(num_blocks, 2)


def caches(manager, name, token_ids):
    """Computes a prompt, from the blocks that are found; the blocks are evicted as room is needed."""
    block_ids, _ = manager.get_computed_blocks(name, token_ids)
    if manager.allocate_slots(name, len(token_ids), block_ids) is not None:
        manager.cache_blocks(name, token_ids, len(token_ids))
    manager.free(name)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("look"), st.sampled_from(NAMES), st.integers(1, 6)),
            st.tuples(st.just("cache"), st.sampled_from(range(len(PROMPTS))), st.integers(1, 41)),
            st.tuples(st.just("forget"), st.sampled_from(range(len(PROMPTS))), st.integers(0, 40)),
            st.tuples(st.just("snapshot")),
        ),
        max_size=30,
    )
)
def test_a_lookup_in_pieces_finds_what_one_at_once_finds(calls):
    manager = make()
    for name, *arguments in calls:
        if name == "look":
            request_id, num_blocks = arguments
            assert manager.look_ahead(request_id, PROMPTS[NAMES.index(request_id)], num_blocks) <= num_blocks
        elif name == "cache":
            caches(manager, "writer", PROMPTS[arguments[0]][: arguments[1]])
        elif name == "forget":
            manager.forget_prefix(PROMPTS[arguments[0]], arguments[1])
        else:
            state, restored = take_snapshot(manager), make()
            restore_snapshot(restored, state)
            assert take_snapshot(restored) == state
            manager = restored
        for number, request_id in enumerate(NAMES):
            one = [*PROMPTS[number]]
            state = take_snapshot(manager)["walks"]
            known = dict(state).get(request_id, [])
            assert manager.get_computed_blocks("other", one)[0][: len(known)] == known
    for number, request_id in enumerate(NAMES):
        assert manager.get_computed_blocks(request_id, PROMPTS[number]) == manager.get_computed_blocks(
            "other", PROMPTS[number]
        )


@pytest.mark.parametrize("num_blocks", [1, 64, 1000])
def test_the_work_of_a_piece_depends_on_its_size_alone(monkeypatch, num_blocks):
    packed, looked = [], []
    pack, match = PrefixIndex.pack, PrefixIndex.match
    monkeypatch.setattr(PrefixIndex, "pack", lambda *args: packed.append(args[3]) or pack(*args))
    monkeypatch.setattr(PrefixIndex, "match", lambda *args: looked.append(args[2]) or match(*args))
    manager, prompt = KVCacheManager(20_000), list(range(100_000))
    caches(manager, "writer", prompt)
    total, num_found = 0, num_blocks
    while num_found == num_blocks:
        packed.clear()
        looked.clear()
        num_found = manager.look_ahead("reader", [*prompt, 1], num_blocks)
        total += num_found
        assert sum(packed) == sum(looked) <= num_blocks
        assert len(packed) <= 5 + num_blocks / 200
    assert total == len(prompt) // 16
    packed.clear()
    assert manager.get_computed_blocks("reader", [*prompt, 1])[1] == len(prompt)
    assert sum(packed) <= 1


def test_a_prompt_that_differs_early_is_not_packed_to_its_end(monkeypatch):
    packed, pack = [], PrefixIndex.pack
    monkeypatch.setattr(PrefixIndex, "pack", lambda *args: packed.append(args[3]) or pack(*args))
    manager = KVCacheManager(20_000)
    caches(manager, "writer", list(range(64)))
    packed.clear()
    assert manager.look_ahead("reader", [*range(32), *[0] * 100_000], 2048) == 2
    assert sum(packed) < 20


def test_many_walks_amid_evictions_stay_exact():
    rng, manager = random.Random(1), KVCacheManager(200, 4)
    prompts = [[rng.randrange(2) for _ in range(300)] for _ in range(3)]
    prompts += [prompt[:150] + [rng.randrange(2) for _ in range(150)] for prompt in prompts]
    num_hits = num_cut = 0
    for _ in range(600):
        number = rng.randrange(len(prompts))
        caches(manager, "writer", prompts[number][: rng.randint(1, 300)])
        name, prompt = str(number), prompts[number]
        before = len(manager._walks[name]._block_ids) if name in manager._walks else 0
        num_hits += manager.look_ahead(name, prompt, rng.randint(1, 12))
        found = manager.get_computed_blocks("other", prompt)
        after = manager._walks[name].known()
        num_cut += len(after) < before
        assert found[0][: len(after)] == after
    assert manager.stats().num_evictions > 1000
    assert num_hits > 500
    assert num_cut > 20


def test_a_lookup_in_pieces_serves_groups_and_states_too():
    groups = [KVCacheGroup("window", 6), KVCacheGroup("full")]
    manager = KVCacheManager(200, 4, groups=groups, num_state_blocks=12)
    prompt = list(range(100))
    manager.allocate_slots("a", 100)
    manager.advance_state("a", 80)
    manager.cache_blocks("a", prompt, 80)
    manager.end_step()
    expected = manager.get_computed_blocks("c", prompt)
    assert expected[1] == 80
    while manager.look_ahead("b", prompt, 3) == 3:
        pass
    assert manager.get_computed_blocks("b", prompt) == expected


def test_nothing_is_looked_up_without_prefix_caching_and_after_a_reset():
    manager = KVCacheManager(30, 2, enable_prefix_caching=False)
    assert manager.look_ahead("a", PROMPTS[0], 5) == 0
    manager = make()
    caches(manager, "writer", PROMPTS[0])
    assert manager.look_ahead("a", PROMPTS[0], 5) == 5
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks("a", PROMPTS[0]) == ([], 0)


def test_a_token_id_beyond_32_bits_is_refused_in_its_piece():
    manager = make()
    caches(manager, "writer", PROMPTS[0])
    prompt = [*PROMPTS[0][:10], 2**40, *PROMPTS[0]]
    assert manager.look_ahead("a", prompt, 1) == 1
    with pytest.raises(ValueError, match="32 bits"):
        manager.look_ahead("a", prompt, 10)


def test_lookups_under_way_count_in_the_size_of_a_snapshot():
    manager = make()
    caches(manager, "writer", PROMPTS[0])
    before = num_snapshot_items(manager)
    for name in NAMES:
        assert manager.look_ahead(name, PROMPTS[0], 5) == 5
    assert num_snapshot_items(manager) == before + 5 * len(NAMES)
