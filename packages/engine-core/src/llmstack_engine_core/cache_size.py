"""The size of the KV cache: blocks, states, and how many rows these let run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from llmstack_engine_core.config import EngineConfig
from llmstack_step_log.control_plane import CacheConfig, cache_config
from llmstack_types import EngineStartError, KVCacheSpec
from llmstack_types.model_runner import LEAST_STATE_BLOCKS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The parts of a cache's memory.

    Attributes:
        num_blocks: Blocks of keys and values.
        num_state_blocks: State blocks; 0 for a model without states.
        num_rows: Requests that can run at once: `max_num_seqs`, or as many as there are states for.
    """

    num_blocks: int
    num_state_blocks: int
    num_rows: int


def choose_cache_size(config: EngineConfig, spec: KVCacheSpec, available_bytes: int) -> CacheSize:
    """The cache that was asked for, or what the device has left, within reason.

    Within reason is twice what the rows can hold with the longest requests: half may stay cached under full load. It is
    the limit of an encoder also where bytes are given: without keys and values its blocks only count tokens.

    Raises:
        EngineStartError: More was asked for than there is, or there is not room for a block, or the states of a row.
    """
    max_num_rows = config.scheduler.max_num_seqs
    probe = cache_config(spec, 1, enable_prefix_caching=False, num_host_blocks=0)
    num_row_blocks = probe.num_blocks_needed(config.model.max_model_len, config.scheduler)
    if config.num_blocks is not None:
        num_blocks, flag = config.num_blocks, "--num-kv-blocks"
        num_left_bytes = available_bytes - spec.num_cache_bytes(num_blocks)
        num_states = spec.num_useful_states(num_blocks, max_num_rows)
        if num_states:
            num_states = max(min(num_states, num_left_bytes // spec.bytes_per_state), LEAST_STATE_BLOCKS)
    else:
        flag = "--gpu-memory-utilization" if config.kv_cache_bytes is None else "--kv-cache-memory-bytes"
        num_bytes = available_bytes if config.kv_cache_bytes is None else config.kv_cache_bytes
        num_blocks, num_states = spec.split_bytes(num_bytes, max_num_rows, num_row_blocks)
    num_rows = spec.num_rows_with_states(num_states, max_num_rows)
    # An encoder's blocks take no memory of a cache, and bookkeeping all the same: 500 MB of them would be 19 GB.
    if config.num_blocks is None and (config.kv_cache_bytes is None or not spec.is_causal):
        num_blocks = min(num_blocks, 2 * num_rows * num_row_blocks + bool(spec.table_groups))
    size = CacheSize(num_blocks, num_states, num_rows)
    _check(size, spec, available_bytes, config.kv_cache_bytes or max(available_bytes, 0), flag)
    if num_states:
        _report_states(size, spec, max_num_rows, num_row_blocks)
    return size


def choose_max_model_len(config: EngineConfig, cache: CacheConfig) -> int:
    """The longest request that the KV cache can hold, at most the configured length.

    Raises:
        EngineStartError: That is less than what the user asked for.
    """
    wanted = config.model.max_model_len
    possible, num_blocks = cache.longest_request(wanted, config.scheduler), cache.num_usable_blocks
    if wanted <= possible:
        return wanted
    num_needed_blocks = cache.num_blocks_needed(wanted, config.scheduler)
    if config.is_max_model_len_explicit:
        flag = "--kv-cache-memory-bytes" if config.num_blocks is None else "--num-kv-blocks"
        raise EngineStartError(
            f"one request of max_model_len {wanted} needs {num_needed_blocks} blocks of KV cache, but "
            f"there are {num_blocks}; lower --max-model-len to {possible} or raise {flag}"
        )
    logger.warning("max_model_len lowered from %d to %d, which the KV cache of %d blocks can hold",
                   wanted, possible, num_blocks)  # fmt: skip
    return possible


def _check(size: CacheSize, spec: KVCacheSpec, available_bytes: int, num_given_bytes: int, flag: str) -> None:
    least = len(spec.table_groups) + 1 if spec.table_groups else 1  # the null block, and one of each group
    num_least_states = LEAST_STATE_BLOCKS if spec.bytes_per_state else 0
    if size.num_blocks < least:
        what = f"{f'{least} blocks' if spec.table_groups else 'one block'} of {spec.block_size} tokens"
        if num_least_states:
            what += f" and {num_least_states} states of {spec.bytes_per_state}, with which one request runs"
        raise EngineStartError(
            f"the KV cache needs at least {spec.num_cache_bytes(least, num_least_states)} bytes for {what}, but "
            f"has {num_given_bytes}; raise {flag} or choose a smaller model"
        )
    num_bytes = spec.num_cache_bytes(size.num_blocks, size.num_state_blocks)
    if num_bytes > available_bytes:
        states = f" and {size.num_state_blocks} states of {spec.bytes_per_state}" if num_least_states else ""
        raise EngineStartError(
            f"out of memory: the KV cache needs {num_bytes} bytes ({size.num_blocks} blocks of "
            f"{spec.bytes_per_block}{states}), but {available_bytes} are available; lower {flag}"
        )


def _report_states(size: CacheSize, spec: KVCacheSpec, max_num_rows: int, num_row_blocks: int) -> None:
    rows = f"{size.num_rows} of {max_num_rows} requests (--max-num-seqs) can run at once"
    if size.num_rows < max_num_rows:
        num_bytes = spec.num_bytes_for_rows(max_num_rows, num_row_blocks)
        rows += f", the others wait: all could run with --kv-cache-memory-bytes {num_bytes}"
    logger.info(
        "states: %d of %d bytes each, two for each request that runs; %s; %d are kept for later requests at least",
        size.num_state_blocks - 1, spec.bytes_per_state, rows, size.num_state_blocks - 1 - 2 * size.num_rows,
    )  # fmt: skip
