"""Construction of scheduler and cache.

Serving, replay and simulation build them here.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from llmstack_core_scheduler import KVCacheManager as KVCache
from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.request import StatusListener
from llmstack_kv_cache import KVCacheGroup, KVCacheManager
from llmstack_types import EngineStartError, KVCacheSpec


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A group of layers.

    Attributes:
        kind: As `KVCacheGroupSpec.kind` says.
        sliding_window: The tokens that a token attends to, itself included; 0 for all.
        num_blocks: Blocks of a storage of its own, for states; 0 where it shares that of the other groups.
    """

    kind: str = "full"
    sliding_window: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The configuration of a cache manager, which is in the header of the step log.

    Attributes:
        num_blocks: Blocks of the storage.
        groups: The groups of layers. Several without states, or one with a window, have block tables of their own.
            Empty where all layers share one table and keep all blocks.
        session_eviction: Whether sessions tell what is evicted next; else what was used the longest ago.
    """

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0
    groups: tuple[GroupConfig, ...] = ()
    session_eviction: bool = False

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """The windows of the groups with block tables of their own; empty where all layers share one table."""
        windows = tuple(group.sliding_window for group in self.groups if group.kind != "state")
        return windows if len(windows) > 1 or any(windows) else ()

    @property
    def num_state_blocks(self) -> int:
        """Blocks of the storage of states; 0 for a model without states."""
        return sum(group.num_blocks for group in self.groups if group.kind == "state")

    @property
    def table_groups(self) -> list[KVCacheGroup]:
        """The groups as the cache manager knows them; one without a window where all layers share a table."""
        return [KVCacheGroup(str(number), window or None) for number, window in enumerate(self.sliding_windows or (0,))]

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can use: with block tables by group, one is the null block."""
        return self.num_blocks - bool(self.sliding_windows)

    def num_blocks_needed(self, num_tokens: int, scheduler: SchedulerConfig) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at once."""
        size, step = self.block_size, scheduler.max_num_step_tokens
        return sum(group.num_blocks_needed(num_tokens, 0, step, size) for group in self.table_groups)

    def longest_request(self, max_num_tokens: int, scheduler: SchedulerConfig) -> int:
        """Most tokens, up to `max_num_tokens`, of a request that the cache has room for."""

        def is_too_long(num_tokens: int) -> bool:
            return self.num_blocks_needed(num_tokens, scheduler) > self.num_usable_blocks

        return bisect_left(range(max_num_tokens + 1), True, key=is_too_long) - 1


def cache_config(
    spec: KVCacheSpec,
    num_blocks: int,
    enable_prefix_caching: bool,
    num_host_blocks: int,
    num_state_blocks: int = 0,
    session_eviction: bool = False,
) -> CacheConfig:
    """The configuration of the cache for a loaded model; what is not causal finds no prefixes.

    Raises:
        EngineStartError: Its layers do not share one block table, which `session_eviction` needs.
    """
    groups = tuple(
        GroupConfig(group.kind, group.sliding_window or 0, num_state_blocks if group.kind == "state" else 0)
        for group in spec.groups
    )
    is_enabled = enable_prefix_caching and spec.is_causal
    made = CacheConfig(num_blocks, spec.block_size, is_enabled, num_host_blocks, groups, session_eviction)
    if session_eviction and made.sliding_windows:
        raise EngineStartError("--session-eviction is for models without sliding windows, whose layers share a table")
    return made


def build_cache(cache: CacheConfig) -> KVCacheManager:
    """The cache as configured."""
    return KVCacheManager(
        cache.num_blocks,
        cache.block_size,
        cache.enable_prefix_caching,
        groups=cache.table_groups,
        num_state_blocks=cache.num_state_blocks,
        num_host_blocks=cache.num_host_blocks,
        knows_sessions=cache.session_eviction,
    )


def build_scheduler(
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    on_status: StatusListener | None = None,
    kv_cache: KVCache | None = None,
) -> Scheduler:
    """A scheduler over `kv_cache`, or a cache of its own; `on_status` is notified of the states of requests."""
    return Scheduler(scheduler, kv_cache or build_cache(cache), on_status=on_status)
