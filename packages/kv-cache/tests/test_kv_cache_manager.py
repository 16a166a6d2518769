"""The manager gives out blocks, shares them, and never names a block that holds something else."""

import tracemalloc

import pytest

from llmstack_kv_cache import (
    AllCleared,
    BlockRemoved,
    KVCacheError,
    KVCacheIntegrityError,
    KVCacheManager,
    UnknownRequestError,
)


def run_once(manager, request_id, tokens, salt=""):
    """Computes a whole request and frees it; how many of its tokens were found."""
    block_ids, num_hits = manager.get_computed_blocks(request_id, tokens, salt)
    assert manager.allocate_slots(request_id, len(tokens), block_ids, salt) is not None
    manager.cache_blocks(request_id, tokens, len(tokens))
    manager.free(request_id)
    return num_hits


def test_50_tokens_take_4_blocks_of_16():
    manager = KVCacheManager(num_blocks=20)
    assert len(manager.allocate_slots("a", 50)) == 4
    assert manager.num_free_blocks == 16


def test_a_decode_step_takes_a_block_only_at_a_boundary():
    manager = KVCacheManager(num_blocks=20)
    manager.allocate_slots("a", 1)
    num_new = [len(manager.allocate_slots("a", num_tokens)) for num_tokens in range(2, 50)]
    assert [position for position, count in enumerate(num_new, 2) if count] == [17, 33, 49]


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_a_hit_is_the_whole_blocks_of_the_common_prefix_but_never_all_tokens(block_size):
    first = list(range(100))
    for common in range(0, 101, 7):
        for length in (common, common + 1, common + 20):
            if length:
                manager = KVCacheManager(200, block_size)
                run_once(manager, "first", first)
                second = first[:common] + [1000 + i for i in range(length - common)]
                expected = block_size * (min(common, length - 1) // block_size)
                assert run_once(manager, "second", second) == expected


def test_requests_of_one_batch_share_a_prefix_that_is_still_being_computed():
    manager = KVCacheManager(num_blocks=20)
    tokens = list(range(40))
    first = manager.allocate_slots("a", 40)
    manager.cache_blocks("a", tokens, 40)
    block_ids, num_hits = manager.get_computed_blocks("b", tokens)
    assert (block_ids, num_hits) == (first[:2], 32)
    second = manager.allocate_slots("b", 40, block_ids)
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    assert manager.num_free_blocks == 16


def test_salts_do_not_share_even_where_one_begins_with_the_other():
    manager = KVCacheManager(num_blocks=20, block_size=2)
    tokens = [1, 2, 3, 4, 5]
    for salt in ("", "a", "ab", "b"):
        assert run_once(manager, "r", tokens, salt) == 0
        assert run_once(manager, "r", tokens, salt) == 4


def test_the_least_recently_used_prefix_is_evicted_first_and_its_tail_before_its_head():
    manager = KVCacheManager(num_blocks=6, block_size=2)
    old, new = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    run_once(manager, "old", old)
    run_once(manager, "new", new)
    run_once(
        manager, "old", [*old[:4], 0]
    )  # uses the two first blocks of `old` again, and a third block that it evicts
    assert manager.get_computed_blocks("x", [*old, 0])[1] == 4
    assert manager.get_computed_blocks("x", [*new, 0])[1] == 6
    run_once(manager, "other", [20, 21, 22, 23])
    assert manager.get_computed_blocks("x", [*new, 0])[1] == 4
    assert manager.get_computed_blocks("x", [*old, 0])[1] == 4


def test_blocks_without_findable_content_are_taken_before_any_is_evicted():
    manager = KVCacheManager(num_blocks=4, block_size=4)
    run_once(manager, "cached", [1, 2, 3, 4, 5])
    for number in range(10):
        assert run_once(manager, str(number), [9]) == 0
    assert manager.get_computed_blocks("x", [1, 2, 3, 4, 5])[1] == 4
    assert manager.stats().num_evictions == 0


def test_children_of_an_evicted_block_are_unreachable_and_reclaimed():
    manager = KVCacheManager(num_blocks=4, block_size=1)
    manager.allocate_slots("a", 1)
    manager.cache_blocks("a", [1], 1)
    # "b" recomputes its last token, so it holds a copy of the block of "a" and chains its second block to that one.
    manager.allocate_slots("b", 2)
    manager.cache_blocks("b", [1, 2], 2)
    manager.free("a")
    manager.allocate_slots("c", 2)
    manager.cache_blocks("c", [7, 8], 2)
    assert manager.get_computed_blocks("x", [1, 2, 3]) == ([], 0)
    manager.free("b")
    manager.free("c")
    run_once(manager, "d", [30, 31, 32, 33])
    assert manager.stats().num_cached_blocks == 4
    assert manager.stats().num_free_blocks == 4
    manager.check_integrity()


def test_a_block_id_used_again_never_serves_the_children_of_its_former_content():
    manager = KVCacheManager(num_blocks=3, block_size=1)
    (reused,) = manager.allocate_slots("a", 1)
    manager.cache_blocks("a", [1], 1)
    manager.allocate_slots("b", 2)
    manager.cache_blocks("b", [1, 2], 2)  # its second block is a child of the block of "a"
    manager.free("a")
    assert manager.allocate_slots("c", 1) == [reused]
    manager.cache_blocks("c", [5], 1)
    assert manager.get_computed_blocks("x", [5, 2, 0]) == ([reused], 1)


def test_what_follows_a_copy_of_a_known_block_is_found_after_the_known_one_and_nowhere_else():
    manager = KVCacheManager(num_blocks=8, block_size=1)
    (known,) = manager.allocate_slots("a", 1)
    manager.cache_blocks("a", [1], 1)
    _, child = manager.allocate_slots("b", 2)
    manager.cache_blocks("b", [1, 2], 2)
    assert manager.get_computed_blocks("x", [1, 2, 3]) == ([known, child], 2)
    assert manager.get_computed_blocks("x", [2, 3]) == ([], 0)


def test_without_prefix_caching_nothing_is_found():
    manager = KVCacheManager(8, 2, enable_prefix_caching=False)
    assert [run_once(manager, "a", [1, 2, 3]) for _ in range(3)] == [0, 0, 0]
    assert manager.prefix_cache_queries == 0


def test_counters_count_a_request_once_however_often_it_was_looked_up():
    manager = KVCacheManager(num_blocks=4, block_size=2)
    tokens = [1, 2, 3, 4, 5]
    run_once(manager, "a", tokens)
    manager.allocate_slots("blocker", 8)
    for _ in range(3):
        block_ids, _ = manager.get_computed_blocks("b", tokens)
        assert manager.allocate_slots("b", 5, block_ids) is None
    manager.free("blocker")
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (5, 0)
    run_once(manager, "b", tokens)
    run_once(manager, "b", tokens)
    stats = manager.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (15, 4)
    assert stats.hit_rate == pytest.approx(4 / 15)
    assert stats.usage == 0.0
    run_once(manager, "b", tokens)
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (20, 8)


def test_reset_forgets_everything_but_waits_for_requests():
    manager = KVCacheManager(num_blocks=4, block_size=2)
    manager.allocate_slots("a", 4)
    manager.cache_blocks("a", [1, 2, 3, 4], 4)
    assert not manager.reset_prefix_cache()
    manager.free("a")
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks("b", [1, 2, 3]) == ([], 0)
    assert manager.stats().num_cached_blocks == 0


@pytest.mark.parametrize(("sizes", "name"), [((0, 16), "num_blocks"), ((4, 0), "block_size"), ((-1, 16), "num_blocks")])
def test_sizes_that_make_no_sense_are_refused_by_name(sizes, name):
    with pytest.raises(ValueError, match=name):
        KVCacheManager(*sizes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_host_blocks", -1),
        ("num_reserved_blocks", -1),
        ("num_reserved_blocks", 4),
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("max_events", -1),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        KVCacheManager(4, **{name: value})


def test_misuse_is_a_typed_error_and_changes_nothing():
    manager = KVCacheManager(num_blocks=4, block_size=2)
    with pytest.raises(UnknownRequestError, match="'nobody'"):
        manager.block_table("nobody")
    with pytest.raises(KVCacheError):
        manager.cache_blocks("nobody", [1, 2], 2)
    table = manager.allocate_slots("a", 4)
    with pytest.raises(ValueError, match="computed_block_ids"):
        manager.allocate_slots("a", 6, table)
    with pytest.raises(ValueError, match="num_computed_tokens"):
        manager.cache_blocks("a", [1, 2, 3, 4, 5, 6], 6)
    with pytest.raises(ValueError, match="num_computed_tokens"):
        manager.cache_blocks("a", [1, 2, 3], 4)
    with pytest.raises(ValueError, match="token_ids"):
        manager.get_computed_blocks("b", [2**31, 1, 1])
    with pytest.raises(ValueError, match="token_ids"):
        manager.cache_blocks("a", [1, 2, 3, 2**31], 4)
    manager.check_integrity()
    manager.cache_blocks("a", [1, 2, 3, 4], 4)
    assert manager.get_computed_blocks("b", [1, 2, 3, 4, 5]) == (table, 4)
    manager.check_integrity()


def test_a_fork_shares_full_blocks_and_copies_the_one_that_is_begun():
    manager = KVCacheManager(num_blocks=10, block_size=4)
    table = manager.allocate_slots("a", 10)
    assert manager.fork("a", "b", 10) == [(table[2], 3)]
    assert manager.block_table("b") == [*table[:2], 3]
    assert manager.fork("a", "c", 8) == []
    assert manager.num_free_blocks == 6
    assert manager.stats().num_forks == 2
    manager.free("a")
    assert manager.num_free_blocks == 7  # the others still hold its first two blocks


def test_forks_that_diverge_find_their_own_continuations_only():
    manager = KVCacheManager(num_blocks=20, block_size=2)
    manager.allocate_slots("a", 3)
    manager.cache_blocks("a", [1, 2, 3], 3)
    manager.fork("a", "b", 3)
    for request_id, last in (("a", 4), ("b", 5)):
        manager.allocate_slots(request_id, 4)
        manager.cache_blocks(request_id, [1, 2, 3, last], 4)
        table = manager.block_table(request_id)
        assert manager.get_computed_blocks("x", [1, 2, 3, last, 0]) == (table, 4)


def test_a_begun_request_may_be_as_short_as_what_was_found_and_takes_no_block_more():
    manager = KVCacheManager(num_blocks=4, block_size=2)
    run_once(manager, "a", [1, 2, 3, 4, 5])
    block_ids, _ = manager.get_computed_blocks("b", [1, 2, 3, 4, 5])
    assert manager.allocate_slots("b", 4, block_ids) == block_ids
    assert manager.num_held_blocks("b") == 2
    assert manager.keeps_prefix("b", 4)


def test_a_fork_without_a_block_for_the_copy_is_none():
    manager = KVCacheManager(num_blocks=2, block_size=4)
    manager.allocate_slots("a", 6)
    assert manager.fork("a", "b", 5) is None
    assert manager.fork("a", "b", 4) == []


def test_a_request_is_swapped_out_and_swapped_in_to_other_blocks():
    manager = KVCacheManager(num_blocks=4, block_size=2, num_host_blocks=3)
    tokens = [1, 2, 3, 4, 5]
    first = manager.allocate_slots("a", 5, salt="tenant")
    manager.cache_blocks("a", tokens, 5)
    assert manager.swap_out("a") == list(zip(first, range(3), strict=True))
    assert (manager.num_free_blocks, manager.num_free_host_blocks) == (4, 0)
    manager.allocate_slots("b", 3)
    assert manager.swap_in("a") is None
    manager.free("b")
    copies = manager.swap_in("a")
    assert copies == list(zip(range(3), manager.block_table("a"), strict=True))
    manager.cache_blocks("a", tokens, 5)
    assert manager.get_computed_blocks("c", tokens, "tenant")[1] == 4
    stats = manager.stats()
    assert (stats.num_swap_outs, stats.num_swap_ins, stats.num_free_host_blocks) == (1, 1, 3)


def test_a_host_pool_without_room_is_none_and_freeing_a_swapped_request_makes_room():
    manager = KVCacheManager(num_blocks=8, block_size=2, num_host_blocks=2)
    manager.allocate_slots("a", 4)
    manager.allocate_slots("b", 2)
    assert manager.swap_out("a") is not None
    assert manager.swap_out("b") is None
    manager.free("a")
    assert manager.swap_out("b") is not None


def test_reserved_blocks_are_never_handed_out():
    manager = KVCacheManager(num_blocks=6, block_size=1, num_reserved_blocks=2)
    assert manager.num_blocks == manager.num_free_blocks == 4
    assert sorted(manager.allocate_slots("a", 4)) == [2, 3, 4, 5]
    assert manager.allocate_slots("a", 5) is None


def test_the_watermark_holds_beginners_back_but_not_those_who_run_nor_the_only_one():
    manager = KVCacheManager(num_blocks=10, block_size=1, watermark=0.2)
    assert manager.allocate_slots("a", 7) is not None
    assert manager.allocate_slots("b", 2) is None
    assert manager.allocate_slots("b", 1) is not None
    assert manager.allocate_slots("a", 9) is not None
    alone = KVCacheManager(num_blocks=10, block_size=1, watermark=0.2)
    assert alone.allocate_slots("a", 10) is not None


def test_the_watermark_holds_back_a_request_of_the_host_unless_no_other_holds_blocks():
    manager = KVCacheManager(num_blocks=10, block_size=1, num_host_blocks=10, watermark=0.2)
    assert KVCacheManager(num_blocks=10).num_host_blocks == 0
    manager.allocate_slots("a", 9)
    manager.swap_out("a")
    manager.allocate_slots("b", 1)
    assert manager.swap_in("a") is None
    manager.free("b")
    assert len(manager.swap_in("a")) == 9


def test_a_pool_grows_and_shrinks_as_far_as_its_blocks_are_free():
    manager = KVCacheManager(num_blocks=4, block_size=2)
    run_once(manager, "a", [1, 2, 3, 4, 5])
    assert manager.resize(2)
    assert manager.get_computed_blocks("a", [1, 2, 3, 4, 5])[1] == 4
    assert manager.resize(1)
    assert manager.get_computed_blocks("a", [1, 2, 3, 4, 5])[1] == 2
    assert manager.resize(5)
    assert manager.allocate_slots("b", 10) is not None
    assert not manager.resize(4)
    assert manager.num_blocks == len(manager._prefix_index.runs) == 5


def test_events_tell_what_can_be_found_with_tokens_and_parents_and_do_not_show_the_salt():
    manager = KVCacheManager(num_blocks=3, block_size=2, max_events=10)
    manager.allocate_slots("a", 6, salt="secret")
    manager.cache_blocks("a", [1, 2, 3, 4, 5, 6], 2)
    manager.cache_blocks("a", [1, 2, 3, 4, 5, 6], 6)
    manager.free("a")
    manager.allocate_slots("b", 2)
    manager.free("b")
    (first, more, removed), num_dropped = manager.fetch_events()
    assert (first.token_ids, first.parent_identity, first.block_size) == ((1, 2), 0, 2)
    assert (more.token_ids, more.parent_identity) == ((3, 4, 5, 6), first.identities[0])
    assert removed == BlockRemoved(more.identities[1:])
    assert num_dropped == 0
    assert (first.salt, more.salt) == ("secret", "")
    assert "secret" not in repr(first)
    manager.reset_prefix_cache()
    assert manager.fetch_events() == ([AllCleared()], 0)


def test_a_log_of_events_that_overflows_says_so():
    manager = KVCacheManager(num_blocks=8, block_size=1, max_events=2)
    manager.allocate_slots("a", 5)
    for num_tokens in range(1, 6):
        manager.cache_blocks("a", [1, 2, 3, 4, 5], num_tokens)
    events, num_dropped = manager.fetch_events()
    assert ([event.token_ids for event in events], num_dropped) == ([(4,), (5,)], 3)
    assert manager.fetch_events() == ([], 0)


def test_without_a_log_there_are_no_events():
    manager = KVCacheManager(num_blocks=8, block_size=1)
    run_once(manager, "a", [1, 2])
    assert manager.fetch_events() == ([], 0)


def test_books_that_do_not_agree_are_found():
    manager = KVCacheManager(num_blocks=4, block_size=2)
    manager.allocate_slots("a", 4)
    manager._tables["a"].block_ids.append(3)
    with pytest.raises(KVCacheIntegrityError, match="references"):
        manager.check_integrity()


def test_a_hundred_thousand_cached_blocks_take_less_than_350_bytes_each():
    tracemalloc.start()
    try:
        manager = KVCacheManager(num_blocks=100_000)
        for start in range(0, 1_600_000, 16_000):
            run_once(manager, "a", list(range(start, start + 16_000)))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert manager.stats().num_cached_blocks == 100_000
    assert num_bytes < 35e6


def test_a_million_empty_blocks_take_less_than_200_megabytes():
    tracemalloc.start()
    try:
        manager = KVCacheManager(num_blocks=1_000_000)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert manager.num_free_blocks == 1_000_000
    assert num_bytes < 200e6
