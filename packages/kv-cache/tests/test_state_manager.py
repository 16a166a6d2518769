"""States of prefixes: which are found, from when on, and which are evicted first."""

import pytest

from llmstack_kv_cache import (
    EMPTY_STATE_ID,
    BlockStored,
    CompanionRemoved,
    CompanionStored,
    KVCacheGroup,
    KVCacheManager,
    UnknownRequestError,
)
from llmstack_kv_cache.prefix_index import PrefixIndex
from llmstack_kv_cache.state_pool import StatePool

TOKENS = list(range(100, 140))


def make(num_state_blocks=20, num_blocks=40, **options):
    return KVCacheManager(num_blocks, 4, num_state_blocks=num_state_blocks, **options)


def compute(manager, request_id, tokens, ends, **options):
    """A request that computes `tokens` in chunks up to `ends`, a step each; the state blocks of its rows."""
    found, num_found = manager.get_computed_blocks(request_id, tokens)
    states = []
    for number, end in enumerate(end for end in ends if end > num_found):
        assert manager.allocate_slots(request_id, end, () if number else found) is not None
        manager.cache_blocks(request_id, tokens, end)
        states.append(manager.advance_state(request_id, end, **options))
        manager.end_step()
    return states


def found_tokens(manager, tokens):
    return manager.get_computed_blocks("probe", [*tokens, 0])[1]


def test_each_step_reads_what_the_last_one_wrote_and_writes_another_block():
    manager = make()
    first, second, third = compute(manager, "a", TOKENS, [4, 5, 6])
    assert first[0] == EMPTY_STATE_ID
    assert second[0] == first[1]
    assert third[0] == second[1]
    assert len({first[1], second[1], third[1]}) >= 2
    assert third[1] != third[0]
    assert manager.stats().num_state_blocks - manager.stats().num_free_state_blocks == 2


def test_a_state_is_found_from_the_step_after_the_one_that_writes_it():
    manager = make()
    manager.allocate_slots("a", 8)
    manager.cache_blocks("a", TOKENS, 8)
    manager.advance_state("a", 8)
    assert found_tokens(manager, TOKENS[:8]) == 0
    manager.end_step()
    assert found_tokens(manager, TOKENS[:8]) == 8


def test_a_hit_ends_at_the_longest_boundary_with_a_state():
    manager = make()
    compute(manager, "a", TOKENS, [8, 13, 24])
    assert found_tokens(manager, TOKENS) == 24
    assert found_tokens(manager, TOKENS[:20]) == 8
    assert manager.num_known_tokens == 20  # its keys and values go on
    assert found_tokens(manager, TOKENS[:7]) == 0
    assert manager.num_known_tokens == 4


def test_blocks_beyond_the_state_are_shared_and_their_tokens_are_no_hits():
    manager = make()
    compute(manager, "a", TOKENS, [8, 13, 24])
    found, num_tokens = manager.get_computed_blocks("b", TOKENS[:22])
    assert (found, num_tokens) == (manager.block_table("a")[:5], 8)
    num_free = manager.num_free_blocks
    assert manager.allocate_slots("b", 12, found) == found
    assert manager.num_free_blocks == num_free
    assert (manager.prefix_cache_hits, manager.prefix_tokens_without_state) == (8, 12)
    manager.cache_blocks("b", TOKENS[:22], 12)
    manager.advance_state("b", 12)
    manager.end_step()
    assert found_tokens(manager, TOKENS[:12]) == 12  # the state that it has left within the shared blocks


def test_a_state_within_shared_blocks_that_were_forgotten_is_not_found():
    manager = make()
    compute(manager, "a", TOKENS, [8, 24])
    found, _ = manager.get_computed_blocks("b", TOKENS[:22])
    manager.allocate_slots("b", 12, found)
    manager.forget_prefix(TOKENS[:24], 8)
    manager.advance_state("b", 12)
    manager.cache_blocks("b", TOKENS[:22], 12)
    manager.end_step()
    assert found_tokens(manager, TOKENS[:20]) == 8
    manager.check_integrity()


def test_tokens_that_are_computed_again_for_want_of_a_state_are_counted_once_per_request():
    manager = make()
    compute(manager, "a", TOKENS, [8, 24])
    for _ in range(3):  # as a request that waits is looked up again and again
        found, num_tokens = manager.get_computed_blocks("b", TOKENS[:20])
    assert (num_tokens, manager.prefix_tokens_without_state) == (8, 0)
    manager.allocate_slots("b", 20, found)
    assert manager.prefix_tokens_without_state == 8


def test_a_state_that_is_not_kept_is_not_found():
    manager = make()
    compute(manager, "a", TOKENS, [8, 16], is_kept=False)
    assert found_tokens(manager, TOKENS) == 0


def test_of_an_answer_the_last_boundary_is_found_unless_an_older_one_was_needed():
    manager = make()
    compute(manager, "a", TOKENS, range(1, 13), replaces_last=True)
    assert found_tokens(manager, TOKENS[:12]) == 12
    assert found_tokens(manager, TOKENS[:10]) == 0
    compute(manager, "b", [*TOKENS[:12], 1, 2], [14])  # finds it
    manager.allocate_slots("a", 16)
    compute_more = range(13, 17)
    for end in compute_more:
        manager.cache_blocks("a", TOKENS, end)
        manager.advance_state("a", end, replaces_last=True)
        manager.end_step()
    assert found_tokens(manager, TOKENS[:16]) == 16
    assert found_tokens(manager, TOKENS[:14]) == 12


def test_a_state_that_is_replaced_while_it_is_held_is_free_once_it_is_given_back():
    manager = KVCacheManager(40, 1, num_state_blocks=20)
    compute(manager, "a", TOKENS, range(1, 6), replaces_last=True)
    assert [found_tokens(manager, TOKENS[:end]) for end in (4, 5)] == [0, 5]
    manager.free("a")
    manager.check_integrity()
    assert manager.stats().num_free_state_blocks == 19


def test_a_state_outlives_its_request_and_is_shared_without_a_copy():
    manager = make()
    (_, written), *_ = compute(manager, "a", TOKENS, [8, 9])
    manager.free("a")
    assert manager.stats().num_free_state_blocks == manager.stats().num_state_blocks
    assert compute(manager, "b", TOKENS[:10], [10])[0][0] == written
    assert compute(manager, "c", TOKENS[:11], [11])[0][0] == written


def test_a_fork_needs_a_state_where_it_begins():
    manager = make()
    states = compute(manager, "a", TOKENS, [8, 13])
    assert [end for end in range(1, 14) if manager.keeps_prefix("a", end)] == [8, 13]
    assert manager.fork("a", "b", 13) is not None
    assert manager.advance_state("b", 14)[0] == states[-1][1]
    with pytest.raises(ValueError, match="num_tokens 9 is where the parent holds no state"):
        manager.fork("a", "c", 9)
    with pytest.raises(UnknownRequestError):
        manager.fork("nobody", "c", 8)


def test_a_fork_cannot_begin_with_what_this_step_writes():
    manager = make()
    manager.allocate_slots("a", 9)
    manager.advance_state("a", 8)
    assert not manager.keeps_prefix("a", 8)
    manager.end_step()
    assert manager.keeps_prefix("a", 8)


def test_there_is_room_for_as_many_requests_as_have_two_states_each():
    manager = make(num_state_blocks=5, num_host_blocks=40)
    compute(manager, "a", TOKENS, [4])
    compute(manager, "b", TOKENS[::-1], [4])
    assert manager.allocate_slots("c", 4) is None
    assert manager.fork("a", "c", 4) is None
    assert manager.swap_out("a") is None  # two that are swapped out would leave no room for a third
    manager.free("b")
    assert manager.swap_out("a") is not None
    assert manager.allocate_slots("c", 4) is not None


def test_a_swapped_request_goes_on_from_its_state():
    manager = make(num_host_blocks=40)
    states = compute(manager, "a", TOKENS, [4, 7])
    manager.swap_out("a")
    assert manager.stats().num_state_blocks - manager.stats().num_free_state_blocks == 1
    manager.swap_in("a")
    assert manager.advance_state("a", 8)[0] == states[-1][1]


def test_states_that_were_found_are_evicted_last():
    pool = StatePool(9, PrefixIndex(9, 4))
    for identity in range(1, 9):
        block_id = pool.take()
        pool.publish(block_id, identity)
        pool.release(block_id)
    found = pool.find(2)
    pool.share(found, is_found=True)
    pool.release(found)
    for _ in range(7):
        pool.release(pool.take())
        pool.take()
    assert [identity for identity in range(1, 9) if pool.find(identity) is not None] == [2]


def test_found_states_leave_room_for_new_ones():
    pool = StatePool(9, PrefixIndex(9, 4))
    for identity in range(1, 9):
        block_id = pool.take()
        pool.publish(block_id, identity)
        pool.release(block_id)
        pool.share(block_id, is_found=True)
        pool.release(block_id)
    for identity in (11, 12):
        block_id = pool.take()
        pool.publish(block_id, identity)
        pool.release(block_id)
    assert [identity for identity in (11, 12) if pool.find(identity)] == [11, 12]  # they do not evict each other
    assert [identity for identity in range(1, 9) if pool.find(identity)] == [3, 4, 5, 6, 7, 8]


def windowed(**options):
    """Full attention, a window of 6 tokens, and states."""
    groups = [KVCacheGroup("window", 6), KVCacheGroup("full")]
    return KVCacheManager(62, 4, groups=groups, num_state_blocks=20, **options)


def compute_with_window(manager, request_id, tokens, ends, is_last_kept=True):
    found, num_found = manager.get_computed_blocks(request_id, tokens)
    last = num_found
    for end in (end for end in ends if end > num_found):
        if not found and last:
            manager.advance(request_id, last)
        assert manager.allocate_slots(request_id, end, found) is not None
        manager.cache_blocks(request_id, tokens, end)
        manager.advance_state(request_id, end, is_kept=is_last_kept or end != ends[-1])
        manager.end_step()
        found, last = (), end
    return num_found


@pytest.mark.parametrize("is_last_kept", [True, False])
def test_a_state_is_no_hit_where_a_window_has_lost_what_lies_before_it(is_last_kept):
    manager = windowed()
    compute_with_window(manager, "a", TOKENS, [8, 16, 24, 32, 40], is_last_kept)
    last = 40 if is_last_kept else 32
    assert [found_tokens(manager, TOKENS[:end]) for end in (8, 16, 24, 32, 40)] == [8, 16, 24, 32, last]
    manager.free("a")
    compute_with_window(manager, "b", list(range(200, 296)), [96])  # takes all blocks that the window has passed
    found = [found_tokens(manager, TOKENS[:end]) for end in (8, 16, 24, 32, 40)]
    assert found == [0, 0, 0, 0, 40 if is_last_kept else 0]
    assert manager.num_known_tokens == 40
    manager.check_integrity()


def test_beside_windows_blocks_beyond_the_state_are_not_shared():
    manager = windowed()
    compute_with_window(manager, "a", TOKENS, [8, 40])
    found, num_tokens = manager.get_computed_blocks("b", TOKENS[:22])
    assert (num_tokens, len(found), manager.num_known_tokens) == (8, 4, 20)
    assert manager.allocate_slots("b", 22, found) is not None
    assert (manager.prefix_cache_hits, manager.prefix_tokens_without_state) == (8, 12)
    assert manager.num_held_blocks("b") <= manager.num_blocks_needed(22, 8, 14)


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="num_state_blocks must be at least 3, got 2"):
        make(2)
    manager = make()
    with pytest.raises(UnknownRequestError):
        manager.advance_state("nobody", 1)
    compute(manager, "a", TOKENS, [8])
    with pytest.raises(ValueError, match="num_tokens must be more than 8, got 8"):
        manager.advance_state("a", 8)
    with pytest.raises(ValueError, match="get_computed_blocks"):
        manager.allocate_slots("b", 8, [999])
    assert manager.allocate_slots("b", 8) is not None


def test_events_name_the_contents_after_which_there_is_a_state():
    """A prefix that is stored may still be computed again for want of one."""
    manager = make(num_state_blocks=3, max_events=50)
    compute(manager, "a", TOKENS, [8, 13])
    stored, _ = manager.fetch_events()
    assert [type(event) for event in stored] == [BlockStored, CompanionStored, BlockStored]
    assert [len(event.identities) for event in stored] == [2, 1, 1]
    assert (stored[0].group, stored[1]) == (0, CompanionStored(stored[0].identities[-1:], 4, 1))
    assert list(manager.stored())[1:] == [stored[1]]
    manager.free("a")
    compute(manager, "b", TOKENS[::-1], [4, 5])  # takes all state blocks
    assert found_tokens(manager, TOKENS[:12]) == 0
    assert manager.num_known_tokens == 12
    removed = [event for event in manager.fetch_events()[0] if type(event) is CompanionRemoved]
    assert removed == [CompanionRemoved(stored[1].identities, 1)]
    assert not [event for event in manager.stored() if event.identities == stored[1].identities]
