"""Groups of layers share one pool, and a window keeps only the blocks it looks at."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_kv_cache import (
    NULL_BLOCK_ID,
    BlockStored,
    CompanionStored,
    DuplicateRequestError,
    KVCacheGroup,
    KVCacheManager,
    UnknownRequestError,
    num_blocks_for,
)
from llmstack_kv_cache.groups import separate

WINDOW = KVCacheGroup("window", sliding_window=6)
FULL = KVCacheGroup("full")


@settings(max_examples=200)
@given(
    windows=st.lists(st.integers(1, 60), max_size=4),
    block_size=st.integers(1, 16),
    num_sessions=st.integers(1, 6),
    length=st.integers(2, 200),
    chunk=st.integers(1, 200),
)
def test_sessions_find_all_of_their_prompts_if_what_hits_need_has_room(
    windows, block_size, num_sessions, length, chunk
):
    groups = [KVCacheGroup("full"), *(KVCacheGroup(str(number), window) for number, window in enumerate(windows))]
    num_kept = sum(
        num_blocks_for(length if group.sliding_window is None else group.sliding_window + 2 * block_size, block_size)
        for group in groups
    )
    running = KVCacheManager(2, block_size, groups=groups).num_blocks_needed(length, 0, chunk)
    manager = KVCacheManager(num_sessions * num_kept + running + 1, block_size, groups=groups)
    for visit in range(3):
        for session in range(num_sessions):
            tokens = [session] * length
            found, num_found = manager.get_computed_blocks("a", tokens)
            assert num_found == (0 if visit == 0 else (length - 1) // block_size * block_size)
            for end in [*range(num_found + chunk, length, chunk), length]:
                if not found and end > chunk:
                    manager.advance("a", end - chunk)
                assert manager.allocate_slots("a", end, found) is not None
                manager.cache_blocks("a", tokens, end)
                found = ()
            manager.free("a")


def test_a_prompt_that_many_begin_with_is_learned_by_a_pool_that_is_full():
    manager = KVCacheManager(num_blocks=41, block_size=2, groups=[FULL, WINDOW])
    for number in range(10):
        run_in_steps(manager, [number] * 30)
    found = [run_in_steps(manager, [77] * 12 + [100 + number] * 18) for number in range(4)]
    assert found == [0, 0, 12, 12]  # the second computes past the end of what both have in common, and keeps it


def run_in_steps(manager, tokens):
    found, num_found = manager.get_computed_blocks("a", tokens)
    for end in range(num_found + 2, len(tokens) + 1, 2):
        if not found and end > num_found + 2:
            manager.advance("a", end - 2)
        assert manager.allocate_slots("a", end, found) is not None
        manager.cache_blocks("a", tokens, end)
        found = ()
    manager.free("a")
    return num_found


def run_once(manager, request_id, tokens):
    """Computes a whole request and frees it; how many of its tokens were found."""
    found, num_hits = manager.get_computed_blocks(request_id, tokens)
    assert manager.allocate_slots(request_id, len(tokens), found) is not None
    manager.cache_blocks(request_id, tokens, len(tokens))
    manager.free(request_id)
    return num_hits


def test_a_window_gives_back_the_blocks_it_has_passed_while_the_request_runs():
    manager = KVCacheManager(num_blocks=41, block_size=2, groups=[FULL, WINDOW])
    manager.allocate_slots("a", 20)
    assert manager.num_free_blocks == 20
    manager.advance("a", 20)  # the token at 20 looks back to 15, so the window needs the blocks from 7 on
    assert manager.num_free_blocks == 27
    full, window = manager.block_tables("a")
    assert NULL_BLOCK_ID not in full
    assert [index for index, block_id in enumerate(window) if block_id == NULL_BLOCK_ID] == list(range(7))
    assert manager.block_table("a") == [block_id for pair in zip(full, window, strict=True) for block_id in pair]


def test_a_long_request_runs_through_a_window_in_a_pool_that_never_holds_it_all():
    manager = KVCacheManager(num_blocks=6, block_size=2, groups=[WINDOW])
    for num_tokens in range(1, 200):
        assert manager.allocate_slots("a", num_tokens) is not None
        manager.advance("a", num_tokens)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_mistral_with_a_window_of_32_holds_3_blocks_per_group_after_402_tokens(num_groups):
    groups = [KVCacheGroup(str(number), sliding_window=32) for number in range(num_groups)]
    manager = KVCacheManager(num_blocks=100, groups=groups)
    next_passed_token = 0
    for num_tokens in [370, *range(371, 403)]:
        if num_tokens - 1 >= next_passed_token and num_tokens > 370:
            next_passed_token = manager.advance("a", num_tokens - 1)
        assert manager.allocate_slots("a", num_tokens) is not None
    tables = manager.block_tables("a")
    assert [len(table) for table in tables] == [26] * num_groups
    assert [len(table) - table.count(NULL_BLOCK_ID) for table in tables] == [3] * num_groups
    assert manager.num_blocks - manager.num_free_blocks == manager.num_held_blocks("a") == 3 * num_groups


def test_gemma_3_keeps_all_blocks_of_the_group_that_sees_everything():
    groups = [KVCacheGroup(f"window {number}", sliding_window=32) for number in range(5)]
    manager = KVCacheManager(num_blocks=200, groups=[*groups, FULL])
    manager.allocate_slots("a", 402)
    manager.advance("a", 401)
    held = [len(table) - table.count(NULL_BLOCK_ID) for table in manager.block_tables("a")]
    assert held == [3, 3, 3, 3, 3, 26]
    assert manager.num_blocks_needed(402, 401, 1) == sum(held)


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=3),
    block_size=st.integers(1, 17),
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_the_blocks_that_are_said_to_be_needed_suffice_and_are_not_many_more(windows, block_size, steps):
    groups = [KVCacheGroup(str(number), window) for number, window in enumerate(windows)]
    needed = KVCacheManager(2, block_size, groups=groups).num_blocks_needed(sum(steps), 0, max(steps))
    manager = KVCacheManager(needed + 1, block_size, groups=groups)
    num_tokens, next_passed_token = 0, 0
    for step in steps:
        if num_tokens and num_tokens >= next_passed_token:
            next_passed_token = manager.advance("a", num_tokens)
        num_tokens += step
        assert manager.allocate_slots("a", num_tokens) is not None
    for window in windows:
        most = num_blocks_for(num_tokens, block_size)
        if window is not None:
            most = min(most, num_blocks_for(max(window, 2) - 1 + max(steps), block_size) + 1)
        needed -= most
    assert needed <= 0


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=3),
    block_size=st.integers(1, 17),
    num_tokens=st.integers(1, 200),
)
def test_the_next_passed_token_is_the_first_at_which_a_block_is_freed(windows, block_size, num_tokens):
    groups = [KVCacheGroup(str(number), window) for number, window in enumerate(windows)]
    manager = KVCacheManager(2000, block_size, groups=groups)
    manager.allocate_slots("a", num_tokens + 120)
    next_passed_token = manager.advance("a", num_tokens)
    num_free_blocks = manager.num_free_blocks
    for later in range(num_tokens + 1, min(next_passed_token, num_tokens + 121)):
        manager.advance("a", later)
        assert manager.num_free_blocks == num_free_blocks
    if next_passed_token <= num_tokens + 120:
        manager.advance("a", next_passed_token)
        assert manager.num_free_blocks > num_free_blocks


def test_a_fork_needs_a_parent_whose_windows_keep_its_prefix():
    manager = KVCacheManager(num_blocks=60, block_size=2, groups=[FULL, WINDOW])
    manager.allocate_slots("a", 20)
    manager.advance("a", 20)
    assert [manager.keeps_prefix("a", num_tokens) for num_tokens in (18, 19, 20)] == [False, True, True]
    assert manager.fork("a", "b", 19) is not None
    with pytest.raises(UnknownRequestError):
        manager.keeps_prefix("nobody", 1)


def test_a_shared_block_of_a_window_does_not_count_as_held():
    manager = KVCacheManager(num_blocks=60, block_size=2, groups=[FULL, WINDOW])
    manager.allocate_slots("a", 8)
    assert (manager.num_held_blocks("a"), manager.num_held_blocks("nobody")) == (8, 0)
    manager.fork("a", "b", 8)
    assert (manager.num_held_blocks("a"), manager.num_held_blocks("b")) == (4, 4)


def test_a_prefix_hits_where_the_window_has_lost_what_lies_before_it():
    manager = KVCacheManager(num_blocks=33, block_size=2, groups=[FULL, WINDOW])
    tokens = list(range(20))
    manager.allocate_slots("a", 20)
    manager.cache_blocks("a", tokens, 20)
    manager.advance("a", 20)
    manager.allocate_slots("b", 20)  # takes what was free, and of what the window gave back
    found, num_hits = manager.get_computed_blocks("c", [*tokens, 20])
    full, window = separate(found, 2)
    assert num_hits == 20
    assert window[:7] == [NULL_BLOCK_ID] * 7
    assert (full, window[7:]) == (manager.block_tables("a")[0], manager.block_tables("a")[1][7:])


def test_a_prefix_is_no_hit_where_one_group_has_lost_it():
    manager = KVCacheManager(num_blocks=23, block_size=2, groups=[FULL, WINDOW])
    tokens = list(range(20))
    manager.allocate_slots("a", 20)
    manager.cache_blocks("a", tokens, 20)
    manager.advance("a", 20)
    manager.allocate_slots("b", 8)  # takes six of the seven blocks that the window gave back, all but the first
    assert manager.get_computed_blocks("c", tokens[:11])[1] == 2


def test_a_model_of_one_full_group_hits_as_the_plain_manager_does():
    manager = KVCacheManager(num_blocks=20, block_size=4, groups=[FULL])
    assert [run_once(manager, "a", list(range(13))) for _ in range(2)] == [0, 12]
    assert manager.stats().hit_rate == pytest.approx(12 / 26)


def test_events_name_the_group_and_tell_the_tokens_of_each_content_once():
    manager = KVCacheManager(num_blocks=20, block_size=2, max_events=10, groups=[WINDOW, FULL])
    run_once(manager, "a", [1, 2, 3, 4])
    (event, companion), num_dropped = manager.fetch_events()
    assert isinstance(event, BlockStored)
    assert (event.token_ids, event.parent_identity, event.group, num_dropped) == ((1, 2, 3, 4), 0, 1, 0)
    assert companion == CompanionStored(event.identities, 2, 0)
    assert list(manager.stored()) == [event, *(CompanionStored((one,), 2, 0) for one in event.identities)]


def test_one_group_alone_is_not_named():
    manager = KVCacheManager(num_blocks=20, block_size=2, max_events=10)
    run_once(manager, "a", [1, 2, 3, 4])
    assert [event.group for event in manager.fetch_events()[0]] == [None]


@pytest.mark.parametrize(
    ("groups", "name"),
    [([], "groups"), ([FULL, FULL], "groups"), ([KVCacheGroup("w", 0)], "sliding_window")],
)
def test_groups_that_make_no_model_are_refused_by_name(groups, name):
    with pytest.raises(ValueError, match=name):
        KVCacheManager(num_blocks=10, groups=groups)


def test_shared_blocks_whose_parent_is_evicted_leave_their_former_chain():
    manager = KVCacheManager(num_blocks=13, block_size=2, groups=[FULL, KVCacheGroup("other")])
    ours, theirs = [1, 2, 3, 4, 5, 6], [1, 2, 7, 8]
    manager.allocate_slots("first", 4)
    manager.cache_blocks("first", theirs, 4)
    manager.allocate_slots("a", 6)
    manager.advance("a", 6)
    manager.fork("a", "b", 6)
    manager.cache_blocks("a", ours, 6)  # its second block hangs on the first one of `first`
    manager.free("first")
    manager.allocate_slots("taker", 6)
    manager.cache_blocks("b", ours, 6)
    manager.check_integrity()
    assert manager.get_computed_blocks("c", [*ours, 9])[1] == 2  # the other group's blocks keep their former place


def test_misuse_is_a_typed_error_and_changes_nothing():
    manager = KVCacheManager(num_blocks=40, block_size=2, num_host_blocks=40, groups=[FULL, WINDOW])
    manager.allocate_slots("a", 20)
    manager.advance("a", 20)
    before = manager.stats()
    with pytest.raises(ValueError, match="num_reserved_blocks"):
        KVCacheManager(num_blocks=4, num_reserved_blocks=0, groups=[WINDOW])
    for error, match, function, *arguments in (
        (UnknownRequestError, "nobody", manager.block_tables, "nobody"),
        (UnknownRequestError, "nobody", manager.swap_in, "nobody"),
        (DuplicateRequestError, "'a'", manager.fork, "a", "a", 20),
        (ValueError, "num_tokens", manager.fork, "a", "b", 4),
        (ValueError, "num_tokens", manager.fork, "a", "b", 21),
        (ValueError, "num_tokens", manager.allocate_slots, "b", 0),
        (ValueError, "computed_block_ids", manager.allocate_slots, "b", 4, [1]),
        (ValueError, "computed_block_ids", manager.allocate_slots, "b", 4, [1, 2]),
        (ValueError, "computed_block_ids", manager.allocate_slots, "b", 4, [0, 0]),
        (ValueError, "computed_block_ids", manager.allocate_slots, "a", 22, [1, 2]),
        (ValueError, "num_computed_tokens", manager.cache_blocks, "a", [1], 2),
        (ValueError, "num_computed_tokens", manager.advance, "a", 21),
        (ValueError, "32 bits", manager.cache_blocks, "a", [2**31] * 20, 20),
    ):
        with pytest.raises(error, match=match):
            function(*arguments)
    assert manager.stats() == before
    assert manager.swap_out("a") is not None
    with pytest.raises(DuplicateRequestError):
        manager.allocate_slots("a", 2)
    manager.check_integrity()


def test_blocks_that_were_found_are_checked_again_once_blocks_were_taken():
    """What a lookup gives may be evicted by the next request that is given blocks."""
    manager = KVCacheManager(9, 4, groups=[KVCacheGroup("full"), KVCacheGroup("window", 8)])
    tokens = list(range(13))
    manager.allocate_slots("a", 13)
    manager.cache_blocks("a", tokens, 12)
    manager.free("a")
    found, num_tokens = manager.get_computed_blocks("b", tokens)
    assert num_tokens == 12
    assert manager.allocate_slots("other", 16) is not None
    with pytest.raises(ValueError, match="get_computed_blocks"):
        manager.allocate_slots("b", 13, found)
    manager.check_integrity()
