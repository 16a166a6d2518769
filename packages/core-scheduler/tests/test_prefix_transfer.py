"""Prefixes that enter from elsewhere are found as any others, and take no block that a request holds."""

from __future__ import annotations

import pytest
from core_scheduler_helpers.steps import make_request, step
from hypothesis import given
from hypothesis import strategies as st

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.media_numbers import MediaNumbers
from llmstack_core_scheduler.prefix_transfer import PrefixTransfer
from llmstack_kv_cache import KVCacheGroup, KVCacheManager
from llmstack_kv_cache.groups import NULL_BLOCK_ID
from llmstack_types import MediaItem, PrefixMedia

BLOCK_SIZE = 16


def make(num_blocks: int = 8) -> tuple[Scheduler, KVCacheManager]:
    cache = KVCacheManager(num_blocks, BLOCK_SIZE)
    return Scheduler(SchedulerConfig(max_model_len=256, max_num_seqs=4), cache), cache


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (16, 0), (17, 1), (33, 2), (48, 2), (49, 3)])
def test_whole_blocks_before_the_last_token_are_imported_and_found(num_tokens: int, num_blocks: int) -> None:
    scheduler, cache = make()
    token_ids = list(range(num_tokens))
    block_ids, _ = scheduler.import_prefix(token_ids, "salt")
    assert len(block_ids) == num_blocks
    assert scheduler.cached_prefix(token_ids, "salt") == (block_ids, 0)
    assert scheduler.cached_prefix(token_ids) == ([], 0)
    assert cache.num_free_blocks == 8
    assert (cache.prefix_cache_queries, cache.prefix_cache_hits) == (0, 0)  # no request has looked
    cache.check_integrity()


def test_a_second_import_has_only_what_is_missing() -> None:
    scheduler, cache = make()
    first, _ = scheduler.import_prefix(list(range(33)))
    second, _ = scheduler.import_prefix(list(range(65)))
    assert (len(first), len(second)) == (2, 2)
    assert scheduler.cached_prefix(list(range(65))) == (first + second, 0)
    assert scheduler.import_prefix(list(range(65))) == ([], 0)
    cache.check_integrity()


def test_a_request_computes_what_follows_the_import() -> None:
    scheduler, cache = make()
    request = make_request("a", 40, max_tokens=2)
    block_ids, _ = scheduler.import_prefix(request.prompt_token_ids)
    scheduler.add_request(request)
    _, outputs = step(scheduler)
    assert cache.block_table("a")[:2] == block_ids
    assert outputs["a"].num_cached_tokens == 32


def test_without_room_nothing_is_imported_and_nothing_is_taken() -> None:
    scheduler, cache = make(num_blocks=4)
    scheduler.add_request(make_request("a", 40, max_tokens=2))
    step(scheduler)
    held = cache.block_table("a")
    assert scheduler.import_prefix(list(range(1000, 1033))) == ([], 0)
    assert cache.block_table("a") == held
    assert len(scheduler.import_prefix(list(range(1000, 1017)))[0]) == 1  # in the block that is free
    cache.check_integrity()


def test_a_prefix_of_a_model_with_states_comes_with_the_state_after_it() -> None:
    cache = KVCacheManager(8, BLOCK_SIZE, num_state_blocks=7)
    scheduler = Scheduler(SchedulerConfig(max_model_len=256, max_num_seqs=4), cache)
    block_ids, state_id = scheduler.import_prefix(list(range(33)))
    assert (len(block_ids), state_id > 0) == (2, True)
    assert scheduler.cached_prefix([*range(32), 99]) == (block_ids, state_id)
    assert scheduler.cached_prefix([*range(20), 99]) == ([], 0)  # its block is there, and no state after it
    missing, other_state_id = scheduler.import_prefix([*range(16), 99])
    assert missing == []
    assert other_state_id not in (0, state_id)
    assert scheduler.cached_prefix([*range(20), 99]) == (block_ids[:1], other_state_id)
    assert scheduler.import_prefix([*range(16), 99]) == ([], 0)
    assert cache.stats().num_free_state_blocks == cache.stats().num_state_blocks
    cache.check_integrity()


def test_a_prefix_is_not_imported_where_there_is_no_room_for_its_state() -> None:
    cache = KVCacheManager(8, BLOCK_SIZE, num_state_blocks=3)
    scheduler = Scheduler(SchedulerConfig(max_model_len=256, max_num_seqs=4), cache)
    scheduler.add_request(make_request("a", 20, 9))
    scheduler.schedule(0.0)
    assert scheduler.import_prefix(list(range(1000, 1033))) == ([], 0)


def test_imported_items_have_the_numbers_of_later_requests() -> None:
    cache, numbers = KVCacheManager(8, BLOCK_SIZE), MediaNumbers()
    prefixes = PrefixTransfer(cache, numbers)
    token_ids, items = list(range(65)), (MediaItem(bytes(32), "image", 20, 8), MediaItem(b"2" * 32, "image", 50, 4))
    media = PrefixMedia("salt", items)
    assert prefixes.cached(token_ids, "salt", media) == ([], 0)
    assert numbers.state() == [0, []], "what only looks gives no numbers"
    block_ids, _ = prefixes.receive(token_ids[:33], "salt", media)
    assert len(block_ids) == 2
    assert [number for number, _ in numbers.number(token_ids, media)] == [1, 2]
    assert prefixes.cached(token_ids, "salt", media) == (block_ids, 0)
    assert prefixes.cached(token_ids, "salt") == (block_ids[:1], 0), "text is no picture"
    assert prefixes.cached(token_ids, "salt", media._replace(items=items[1:])) == (block_ids[:1], 0)
    cache.check_integrity()


def test_without_numbers_left_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmstack_core_scheduler.media_numbers._LAST_NUMBER", 0)
    cache = KVCacheManager(8, BLOCK_SIZE)
    media = PrefixMedia("", (MediaItem(bytes(32), "image", 0, 8),))
    assert PrefixTransfer(cache, MediaNumbers()).receive(list(range(33)), "", media) == ([], 0)
    assert cache.num_free_blocks == 8


@pytest.mark.parametrize("windows", [(None, 33), (33, None, None), (33,), (17, 40)])
@given(ends=st.lists(st.integers(1, 700), min_size=1, max_size=4))
def test_only_blocks_that_were_to_be_filled_are_found_behind_a_window(
    windows: tuple[int | None, ...], ends: list[int]
) -> None:
    groups = [KVCacheGroup(str(number), window) for number, window in enumerate(windows)]
    cache = KVCacheManager(200, BLOCK_SIZE, groups=groups)
    scheduler = Scheduler(SchedulerConfig(max_model_len=1024, max_num_seqs=4), cache)
    filled: set[int] = set()
    for end in ends:
        filled.update(scheduler.import_prefix(list(range(end)))[0])
        found, _ = scheduler.cached_prefix(list(range(end)))
        assert len(found) == (end - 1) // BLOCK_SIZE * len(windows)
        for num_tokens in range(1, 701, BLOCK_SIZE):
            assert filled.issuperset(set(scheduler.cached_prefix(list(range(num_tokens)))[0]) - {NULL_BLOCK_ID})
        cache.check_integrity()


def test_a_window_takes_no_room_for_what_it_has_passed() -> None:
    cache = KVCacheManager(61, BLOCK_SIZE, groups=[KVCacheGroup("full"), KVCacheGroup("window", 33)])
    scheduler = Scheduler(SchedulerConfig(max_model_len=1024, max_num_seqs=4), cache)
    block_ids, _ = scheduler.import_prefix(list(range(641)))
    assert len(block_ids) == 80
    assert [number for number in range(40) if block_ids[2 * number + 1] != NULL_BLOCK_ID] == [38, 39]
    assert scheduler.cached_prefix(list(range(641))) == (block_ids, 0)
    assert scheduler.cached_prefix(list(range(321))) == ([], 0), "the window's blocks are not there"
    cache.check_integrity()
