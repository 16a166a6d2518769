"""Construction of scheduler and cache.

Serving, replay and simulation build them here.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from llmstack_core_scheduler import KVCacheManager as KVCache
from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.request import StatusListener
from llmstack_kv_cache import HybridKVCacheManager, KVCacheGroup, KVCacheManager
from llmstack_types import KVCacheSpec


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The configuration of a cache manager, which is in the header of the step log.

    Attributes:
        num_blocks: Blocks of the storage.
        sliding_windows: For each group of layers with block tables of its own, the tokens that a token attends to, 0
            for all; empty where all layers share one table and keep all blocks.
    """

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0
    sliding_windows: tuple[int, ...] = ()

    @property
    def groups(self) -> list[KVCacheGroup]:
        """The groups of layers; one without a window where all layers share a table."""
        return [KVCacheGroup(str(number), window or None) for number, window in enumerate(self.sliding_windows or (0,))]

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can use: with groups, one is the null block."""
        return self.num_blocks - bool(self.sliding_windows)

    def num_blocks_needed(self, num_tokens: int, scheduler: SchedulerConfig) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at once."""
        size, step = self.block_size, scheduler.max_num_step_tokens
        return sum(group.num_blocks_needed(num_tokens, 0, step, size) for group in self.groups)

    def longest_request(self, max_num_tokens: int, scheduler: SchedulerConfig) -> int:
        """Most tokens, up to `max_num_tokens`, of a request that the cache has room for."""

        def is_too_long(num_tokens: int) -> bool:
            return self.num_blocks_needed(num_tokens, scheduler) > self.num_usable_blocks

        return bisect_left(range(max_num_tokens + 1), True, key=is_too_long) - 1


def cache_config(spec: KVCacheSpec, num_blocks: int, enable_prefix_caching: bool, num_host_blocks: int) -> CacheConfig:
    """The configuration of the cache for a loaded model; what is not causal finds no prefixes."""
    windows = tuple(group.sliding_window or 0 for group in spec.table_groups)
    return CacheConfig(num_blocks, spec.block_size, enable_prefix_caching and spec.is_causal, num_host_blocks, windows)


def build_cache(cache: CacheConfig) -> HybridKVCacheManager | KVCacheManager:
    """The cache as configured: the hybrid one for groups of layers."""
    sizes = (cache.num_blocks, cache.block_size, cache.enable_prefix_caching)
    if cache.sliding_windows:
        return HybridKVCacheManager(cache.groups, *sizes, num_host_blocks=cache.num_host_blocks)
    return KVCacheManager(*sizes, num_host_blocks=cache.num_host_blocks)


def build_scheduler(
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    on_status: StatusListener | None = None,
    kv_cache: KVCache | None = None,
) -> Scheduler:
    """A scheduler over `kv_cache`, or a cache of its own; `on_status` is notified of the states of requests."""
    return Scheduler(scheduler, kv_cache or build_cache(cache), on_status=on_status)
