"""Figures about a cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """A cache at one moment; counters grow from its construction.

    Attributes:
        num_free_blocks: Blocks that no request references, those with findable content included.
        num_cached_blocks: Blocks whose content can be found, referenced or not.
        num_requests: Requests that hold blocks.
        prefix_cache_queries: Counter of tokens looked up, by requests that were then given blocks.
        prefix_cache_hits: Counter of tokens they found.
        num_evictions: Counter of contents given up to make room.
        num_host_blocks: Blocks of the host pool.
        num_free_host_blocks: Host blocks that no swapped-out request holds.
        num_swap_outs: Counter of requests moved to the host pool.
        num_swap_ins: Counter of requests swapped in.
        num_forks: Counter of requests that began as another's child.
        num_state_blocks: Blocks of states that requests can use.
        num_free_state_blocks: State blocks that no request holds; findable ones count.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_requests: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_evictions: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_swap_outs: int
    num_swap_ins: int
    num_forks: int
    num_state_blocks: int = 0
    num_free_state_blocks: int = 0

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, in [0, 1]."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up that were found, in [0, 1]; 0 before the first."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else 0.0
