"""Figures that one step reports about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler's state after a step; counters grow from the engine's start.

    Attributes:
        step: Number of steps so far.
        num_running: Requests with blocks.
        num_waiting: Requests without blocks, new and preempted.
        num_scheduled_tokens: Tokens computed in this step.
        num_free_blocks: Blocks that nobody references; cached ones count, since they can be evicted.
        num_blocks: All blocks that requests can use.
        num_preemptions: Counter of preemptions.
        prefix_cache_queries: Counter of tokens looked up in the prefix cache.
        prefix_cache_hits: Counter of tokens found there.
    """

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_scheduled_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests hold, in [0, 1]."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
