"""The part of an engine core that decides: scheduler and cache, built in one way for serving, replay and simulation."""

from __future__ import annotations

from dataclasses import dataclass

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.request import StatusListener
from llmstack_kv_cache import KVCacheManager


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a `KVCacheManager` is constructed with; the log of steps records it."""

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0


def build_cache(cache: CacheConfig) -> KVCacheManager:
    """The cache as configured."""
    return KVCacheManager(
        cache.num_blocks, cache.block_size, cache.enable_prefix_caching, num_host_blocks=cache.num_host_blocks
    )


def build_scheduler(
    scheduler: SchedulerConfig, cache: CacheConfig, on_status: StatusListener | None = None
) -> Scheduler:
    """A scheduler over a cache of its own; `on_status` hears the states of requests."""
    return Scheduler(scheduler, build_cache(cache), on_status=on_status)
