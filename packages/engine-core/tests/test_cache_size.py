"""The size of a cache with states: how many rows run follows from the memory."""

from __future__ import annotations

import logging

import pytest

from llmstack_engine_core import EngineConfig, SchedulerConfig
from llmstack_engine_core.cache_size import CacheSize, choose_cache_size
from llmstack_types import EngineStartError, KVCacheGroupSpec, KVCacheSpec, ModelRunnerConfig

BLOCK, STATE = 100, 5000
SPEC = KVCacheSpec(
    2, 16, "float32", BLOCK, 97, groups=(KVCacheGroupSpec((0,)), KVCacheGroupSpec((1,), kind="state")),
    bytes_per_state=STATE,
)  # fmt: skip


def size(available_bytes: int, spec: KVCacheSpec = SPEC, **changes: object) -> CacheSize:
    model = ModelRunnerConfig("model", max_model_len=320, max_num_seqs=64)
    config = EngineConfig(model, scheduler=SchedulerConfig(max_model_len=320, max_num_seqs=64), **changes)
    return choose_cache_size(config, spec, available_bytes)


def test_the_rows_follow_from_the_bytes_and_the_log_says_how_many_wait(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = size(10**6, kv_cache_bytes=100_000)
    assert found == CacheSize(num_blocks=200, num_state_blocks=16, num_rows=5)
    needed = SPEC.num_bytes_for_rows(64, 20)
    assert (
        f"states: 15 of 5000 bytes each, two for each request that runs; 5 of 64 requests (--max-num-seqs) can run "
        f"at once, the others wait: all could run with --kv-cache-memory-bytes {needed}; 5 are kept for later requests"
    ) in caplog.text
    assert size(10**9, kv_cache_bytes=needed).num_rows == 64


def test_a_number_of_blocks_leaves_states_what_memory_there_is() -> None:
    assert size(100_000, num_blocks=400) == CacheSize(400, 12, 3)
    assert size(10**9, num_blocks=400) == CacheSize(400, 1 + 3 * 64, 64)


def test_a_default_cache_is_what_the_rows_that_can_run_have_use_for() -> None:
    assert size(10**8).num_rows == 64
    assert size(10**8).num_blocks == 2 * 64 * 20
    few = size(70_000)
    assert few.num_blocks <= 2 * few.num_rows * 20


def test_one_row_that_just_fits_runs_alone() -> None:
    assert size(10**6, kv_cache_bytes=3 * STATE + BLOCK) == CacheSize(1, 3, 1)


def test_less_than_one_row_is_refused_with_the_number_to_set() -> None:
    with pytest.raises(EngineStartError) as caught:
        size(10**6, kv_cache_bytes=3 * STATE + BLOCK - 1)
    assert str(caught.value) == (
        "the KV cache needs at least 15100 bytes for one block of 16 tokens and 3 states of 5000, with which one "
        "request runs, but has 15099; raise --kv-cache-memory-bytes or choose a smaller model"
    )
    with pytest.raises(EngineStartError, match=r"needs 15200 bytes \(2 blocks of 100 and 3 states of 5000\)"):
        size(15_199, num_blocks=2)


def test_an_encoder_has_no_more_blocks_than_its_rows_use_whatever_bytes_are_given() -> None:
    encoder = KVCacheSpec(2, 16, "float32", 1, 97, is_generative=False, is_causal=False)
    assert size(10**9, encoder, kv_cache_bytes=500 << 20).num_blocks == 2 * 64 * 20
    assert size(10**9, encoder).num_blocks == 2 * 64 * 20
    assert size(10**9, encoder, num_blocks=5000).num_blocks == 5000
