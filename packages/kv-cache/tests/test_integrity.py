"""Books that do not agree are reported, each kind of disagreement by its own sentence."""

import pytest

from llmstack_kv_cache import DuplicateRequestError, KVCacheGroup, KVCacheIntegrityError, KVCacheManager
from llmstack_kv_cache.prefix_index import Run
from llmstack_kv_cache.session_turns import Segment

TOKENS = list(range(40))


def used_manager():
    """A manager with a request that shares blocks with another, free findable blocks, and a request on the host."""
    manager = KVCacheManager(30, 4, num_host_blocks=8)
    for request_id, tokens in (("gone", [7] * 20), ("a", TOKENS), ("b", TOKENS)):
        block_ids, _ = manager.get_computed_blocks(request_id, tokens)
        manager.allocate_slots(request_id, len(tokens), block_ids)
        manager.cache_blocks(request_id, tokens, len(tokens))
        if request_id == "gone":
            manager.free(request_id)
    manager.allocate_slots("host", 8)
    manager.swap_out("host")
    manager.check_integrity()
    return manager


def make_shared_block_writable(manager):
    manager._tables["b"].num_full_blocks = 0


def count_more_cached_than_full_blocks(manager):
    manager._tables["b"].num_cached_blocks += 5


def hold_in_both_pools(manager):
    manager._host_pool._request_id_to_salt["a"] = ""


def lose_an_owner(manager):
    manager._pool._num_owners[next(iter(manager._pool._num_owners))] += 1


def take_a_block_from_its_table(manager):
    table = manager._tables["a"]
    manager._pool._holders[table.block_ids[-1]] = Segment([])


def lose_a_free_block(manager):
    manager._pool._unfindable.pop()


def miscount_free_blocks(manager):
    manager._pool.num_free_blocks += 1


def miscount_a_segment(manager):
    next(iter(manager._pool._segments)).num_free += 1


def find_an_unfindable_block(manager):
    manager._prefix_index.runs[manager._pool._unfindable[0]] = Run(999, b"x", b"", [])


def find_a_run_under_another_key(manager):
    next(iter(manager._prefix_index._key_to_run.values())).key = b"other"


def miscount_findable_blocks(manager):
    manager._prefix_index.num_findable += 1


def lose_tokens_of_a_run(manager):
    next(iter(manager._prefix_index._key_to_run.values())).contents += b"more"


def give_two_runs_one_identity(manager):
    for run in manager._prefix_index._key_to_run.values():
        run.start = 0


def hold_a_host_block_twice(manager):
    manager._host_pool._free.append(0)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (make_shared_block_writable, "a block that is still written has several owners"),
        (count_more_cached_than_full_blocks, "a table has more cached or full blocks than blocks"),
        (hold_in_both_pools, "a request is in both pools, or in none"),
        (lose_an_owner, "references of shared blocks are not the sum of the tables"),
        (take_a_block_from_its_table, "references are not the sum of the tables"),
        (lose_a_free_block, "the free blocks are not those without a holder"),
        (miscount_free_blocks, "the free blocks are miscounted"),
        (miscount_a_segment, "a segment miscounts its free blocks"),
        (find_an_unfindable_block, "a free block that can be found is among those that cannot"),
        (find_an_unfindable_block, "the runs and the blocks disagree on what is found where"),
        (find_a_run_under_another_key, "a run is found under another key"),
        (miscount_findable_blocks, "the findable blocks are miscounted"),
        (lose_tokens_of_a_run, "a run has more or less tokens than blocks"),
        (give_two_runs_one_identity, "two cached contents share an identity"),
        (hold_a_host_block_twice, "the host blocks are not each free or held once"),
    ],
)
def test_a_disagreement_of_the_books_is_named(spoil, problem):
    manager = used_manager()
    spoil(manager)
    with pytest.raises(KVCacheIntegrityError) as caught:
        manager.check_integrity()
    assert problem in str(caught.value).split("; ")


def used_hybrid(**options):
    manager = KVCacheManager(30, 4, groups=[KVCacheGroup("full"), KVCacheGroup("window", 6)], **options)
    manager.allocate_slots("a", 20)
    manager.allocate_slots("host", 8)
    manager.check_integrity()
    return manager


def test_groups_that_reach_over_different_numbers_of_blocks_are_named():
    manager = used_hybrid()
    manager._tables["a"].num_blocks += 1
    with pytest.raises(KVCacheIntegrityError, match="the groups of a request reach over different numbers of blocks"):
        manager.check_integrity()


def test_a_request_in_both_pools_of_a_hybrid_cache_is_named():
    manager = used_hybrid(num_host_blocks=8)
    manager.swap_out("host")
    manager._tables["host"] = manager._tables["a"]
    with pytest.raises(KVCacheIntegrityError, match="a request is in both pools, or in none"):
        manager.check_integrity()


def count_another_owner(pool):
    pool._num_owners[next(iter(pool._num_owners))] += 1


def lose_a_state_block(pool):
    pool._unused.pop()


def find_a_state_twice(pool):
    pool._identity_to_block[10**6] = next(iter(pool._block_to_identity))


def find_an_unused_state(pool):
    pool._block_to_identity[pool._unused[0]] = 10**6
    pool._identity_to_block[10**6] = pool._unused[0]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (count_another_owner, "the owners of state blocks are miscounted"),
        (lose_a_state_block, "the state blocks are not each free or held"),
        (find_a_state_twice, "the states and their blocks disagree on what is found where"),
        (find_an_unused_state, "a state block is in the wrong order of eviction"),
    ],
)
def test_a_disagreement_of_the_books_of_states_is_named(spoil, problem):
    manager = KVCacheManager(30, 4, num_state_blocks=9)
    manager.allocate_slots("a", 8)
    manager.cache_blocks("a", TOKENS, 8)
    manager.advance_state("a", 8)
    manager.end_step()
    manager.check_integrity()
    spoil(manager._states.pool)
    with pytest.raises(KVCacheIntegrityError, match=problem):
        manager.check_integrity()


def test_a_request_without_a_state_is_named():
    manager = KVCacheManager(30, 4, num_state_blocks=9)
    manager.allocate_slots("a", 8)
    del manager._states.tables["a"]
    with pytest.raises(KVCacheIntegrityError, match="keys and values without a state, or a state alone"):
        manager.check_integrity()


def test_a_table_that_lacks_a_block_is_named():
    manager = used_manager()
    manager._tables["a"].block_ids.pop()
    with pytest.raises(KVCacheIntegrityError, match="a table without a window has passed blocks"):
        manager.check_integrity()


def test_blocks_that_the_only_window_has_passed_before_they_are_full_are_not_found():
    manager = KVCacheManager(30, 4, groups=[KVCacheGroup("window", 6)], num_state_blocks=9)
    manager.allocate_slots("a", 20)
    manager.advance("a", 16)
    manager.cache_blocks("a", TOKENS[:20], 20)
    manager.check_integrity()
    assert manager.get_computed_blocks("b", TOKENS[:21])[1] == 0


def test_a_state_before_what_the_only_window_has_kept_is_not_found():
    manager = KVCacheManager(30, 4, groups=[KVCacheGroup("window", 1)], num_state_blocks=9)
    manager.allocate_slots("a", 16)
    manager.cache_blocks("a", TOKENS, 16)
    manager.advance("a", 16)
    manager.advance_state("a", 8)
    manager.end_step()
    manager.check_integrity()
    assert manager.get_computed_blocks("b", TOKENS[:9])[1] == 0


def test_only_windows_make_blocks_pass():
    assert not KVCacheManager(4, 4).has_windows
    assert not KVCacheManager(4, 4, groups=[KVCacheGroup("full")]).has_windows
    assert KVCacheManager(4, 4, groups=[KVCacheGroup("full"), KVCacheGroup("window", 6)]).has_windows


def test_without_prefix_caching_a_hybrid_cache_finds_nothing():
    manager = KVCacheManager(30, 4, False, groups=[KVCacheGroup("full"), KVCacheGroup("window", 6)])
    manager.allocate_slots("a", 20)
    manager.cache_blocks("a", TOKENS[:20], 20)
    manager.free("a")
    assert manager.get_computed_blocks("b", TOKENS) == ([], 0)


@pytest.mark.parametrize("make", [used_manager, lambda: used_hybrid(num_host_blocks=8)])
def test_a_request_on_the_host_is_not_given_other_blocks(make):
    manager = make()
    if manager.num_free_host_blocks == manager.num_host_blocks:
        manager.swap_out("host")
    before = manager.stats()
    with pytest.raises(DuplicateRequestError, match="host"):
        manager.allocate_slots("host", 8)
    assert manager.stats() == before


def test_blocks_that_a_window_has_passed_before_they_are_full_are_not_found():
    manager = KVCacheManager(30, 4, groups=[KVCacheGroup("full"), KVCacheGroup("window", 6)])
    manager.allocate_slots("a", 20)
    manager.advance("a", 16)
    manager.cache_blocks("a", TOKENS[:20], 20)
    manager.check_integrity()
    manager.free("a")
    assert manager.get_computed_blocks("b", TOKENS[:21])[1] == 20
    assert manager.get_computed_blocks("b", TOKENS[:9])[1] == 0
