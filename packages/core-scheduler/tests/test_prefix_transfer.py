"""Prefixes that enter from elsewhere are found as any others, and take no block that a request holds."""

from __future__ import annotations

import pytest
from core_scheduler_helpers.steps import make_request, step

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_kv_cache import KVCacheManager

BLOCK_SIZE = 16


def make(num_blocks: int = 8) -> tuple[Scheduler, KVCacheManager]:
    cache = KVCacheManager(num_blocks, BLOCK_SIZE)
    return Scheduler(SchedulerConfig(max_model_len=256, max_num_seqs=4), cache), cache


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (16, 0), (17, 1), (33, 2), (48, 2), (49, 3)])
def test_whole_blocks_before_the_last_token_are_imported_and_found(num_tokens: int, num_blocks: int) -> None:
    scheduler, cache = make()
    token_ids = list(range(num_tokens))
    block_ids = scheduler.import_prefix(token_ids, "salt")
    assert len(block_ids) == num_blocks
    assert scheduler.cached_prefix(token_ids, "salt") == block_ids
    assert scheduler.cached_prefix(token_ids) == []
    assert cache.num_free_blocks == 8
    assert (cache.prefix_cache_queries, cache.prefix_cache_hits) == (0, 0)  # no request has looked
    cache.check_integrity()


def test_a_second_import_has_only_what_is_missing() -> None:
    scheduler, cache = make()
    first = scheduler.import_prefix(list(range(33)))
    second = scheduler.import_prefix(list(range(65)))
    assert (len(first), len(second)) == (2, 2)
    assert scheduler.cached_prefix(list(range(65))) == first + second
    assert scheduler.import_prefix(list(range(65))) == []
    cache.check_integrity()


def test_a_request_computes_what_follows_the_import() -> None:
    scheduler, cache = make()
    request = make_request("a", 40, max_tokens=2)
    block_ids = scheduler.import_prefix(request.prompt_token_ids)
    scheduler.add_request(request)
    _, outputs = step(scheduler)
    assert cache.block_table("a")[:2] == block_ids
    assert outputs["a"].num_cached_tokens == 32


def test_without_room_nothing_is_imported_and_nothing_is_taken() -> None:
    scheduler, cache = make(num_blocks=4)
    scheduler.add_request(make_request("a", 40, max_tokens=2))
    step(scheduler)
    held = cache.block_table("a")
    assert scheduler.import_prefix(list(range(1000, 1033))) == []
    assert cache.block_table("a") == held
    assert len(scheduler.import_prefix(list(range(1000, 1017)))) == 1  # in the block that is free
    cache.check_integrity()
