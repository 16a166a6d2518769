"""Seeded simulations of prompts with items: every answer is what the model says of its own vectors."""

from collections import Counter
from functools import cache

import pytest
from core_scheduler_helpers.media_simulation import MediaSimulation, run_media_seed
from core_scheduler_helpers.replays import check_replay

from llmstack_core_scheduler.testing import FakeKVCacheManager, WrongKVError
from llmstack_types import FinishReason

kv_cache = pytest.importorskip("llmstack_kv_cache")

WINDOWS = ((8,), (None, 5), (1, None), (3, 20, None), (None, None, 12), (2,), (40, 7))


def make_manager(num_blocks, block_size, num_host_blocks):
    return kv_cache.KVCacheManager(num_blocks, block_size, num_host_blocks=num_host_blocks)


def run_plain(seed):
    return run_media_seed(seed, make_manager)


def run_stages(seed):
    return run_media_seed(seed, make_manager, (None,), 2 + seed % 3)


def run_windows(seed):
    windows = WINDOWS[seed % len(WINDOWS)]
    groups = [kv_cache.KVCacheGroup(str(number), window) for number, window in enumerate(windows)]

    def make(num_blocks, block_size, num_host_blocks):
        return kv_cache.KVCacheManager(num_blocks, block_size, groups=groups, num_host_blocks=num_host_blocks)

    return run_media_seed(seed, make, windows, 1 + seed % 2)


def run_states(seed):
    num_state_blocks = 3 + seed % 7 if seed % 2 else 200

    def make(num_blocks, block_size, num_host_blocks):
        return kv_cache.KVCacheManager(
            num_blocks, block_size, num_host_blocks=num_host_blocks, num_state_blocks=num_state_blocks
        )

    return run_media_seed(seed, make, (None,), 1, num_state_blocks)


RUNS = {"plain": run_plain, "stages": run_stages, "windows": run_windows, "states": run_states}


@cache
def totals_of(kind, first, last):
    totals = Counter()
    for seed in range(first, last):
        totals += RUNS[kind](seed)
    return totals


@pytest.mark.parametrize("kind", RUNS)
def test_every_answer_is_what_the_model_says_of_its_own_items(kind):
    totals = totals_of(kind, 0, 25)
    assert totals[FinishReason.LENGTH] > 50
    assert min(totals["encoded"], totals["encoder_hits"], totals["evictions"], totals["hits"]) > 25
    assert min(totals["later_parts"], totals["rowless"], totals["repeats"]) > 0


def test_a_fork_does_not_read_what_its_aborted_parent_was_to_write_when_the_item_of_that_failed():
    RUNS["plain"](535)


def test_the_simulations_are_messy_enough_to_mean_something():
    totals = Counter()
    for kind in RUNS:
        totals += totals_of(kind, 0, 25)
    for name in ("swap_outs", "swap_ins", "shared", "copies", "drafts", "accepted", "aborted", "refused", "repeats"):
        assert totals[name] > 50, name
    assert min(totals["crashes"], totals["yields"], totals["rowless"], totals[FinishReason.ERROR]) > 3


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("first", range(25, 3_025, 500))
def test_every_answer_of_3_000_runs_is_what_the_model_says(kind, first):
    totals_of(kind, first, first + 500)


@pytest.mark.parametrize("seed", range(10))
def test_a_recorded_run_replays_to_the_same_decisions_without_a_model(seed):
    check_replay(MediaSimulation(seed, make_manager), MediaSimulation(seed, make_manager))


class TakesKeysForTokens(FakeKVCacheManager):
    """Finds a prompt with another item: it compares what is not below 0."""

    def get_computed_blocks(self, request_id, token_ids, salt=""):
        return super().get_computed_blocks(request_id, [max(one, -1) for one in token_ids], salt)

    def cache_blocks(self, request_id, token_ids, num_computed_tokens):
        super().cache_blocks(request_id, [max(one, -1) for one in token_ids], num_computed_tokens)


def run_with_a_wrong_cache():
    for seed in range(60):
        run_media_seed(seed, lambda blocks, size, host: TakesKeysForTokens(blocks, size, num_host_blocks=host))


def test_a_cache_that_takes_one_item_for_another_is_found():
    with pytest.raises(WrongKVError, match="would read something else"):
        run_with_a_wrong_cache()
