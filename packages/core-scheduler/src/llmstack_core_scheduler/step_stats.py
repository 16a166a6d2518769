"""The statistics of a step, gathered from the parts of the scheduler."""

from __future__ import annotations

from llmstack_core_scheduler.drafting import Drafting
from llmstack_core_scheduler.encoding import Encoding
from llmstack_core_scheduler.forking import Forking
from llmstack_core_scheduler.preemptor import Preemptor
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.waiting_queue import WaitingQueue
from llmstack_types import SchedulerStats

LastStep = tuple[int, int, int]
"""Figures of the last step with results: tokens, rows, and tokens of its requests that it left for later steps."""

NO_STEP: LastStep = (0, 0, 0)
NO_STAGES = (0, 0, None, None)
"""The last figures of a step: those of audits, an encoder and a disk, which the scheduler does not know."""
# Calling the class, a function of Python around this, takes twice as long, and every step makes one.
_make = tuple.__new__


def step_stats(
    step: int,
    last: LastStep,
    num_running: int,
    waiting: WaitingQueue,
    num_swapped: int,
    manager: KVCacheManager,
    preemptor: Preemptor,
    forking: Forking,
    drafting: Drafting,
    encoding: Encoding | None,
) -> SchedulerStats:
    """The state after `step` steps."""
    tenants = waiting.tenants or waiting.update_tenants()
    num_host_blocks, num_accepted = manager.num_host_blocks, drafting.num_accepted
    num_tokens, num_rows, num_left_tokens = last
    # More than 30 values at once become a list first, one by one.
    return _make(
        SchedulerStats,
        (  # in the order of the class
            step, num_running, len(waiting.requests), num_tokens, manager.num_free_blocks, manager.num_blocks,
            preemptor.num_preemptions, manager.prefix_cache_queries, manager.prefix_cache_hits, num_swapped,
            num_host_blocks, manager.num_free_host_blocks if num_host_blocks else 0, preemptor.num_swaps,
            preemptor.num_swapped_out_blocks, preemptor.num_swapped_in_blocks, forking.num_forks,
            drafting.num_draft_tokens, sum(num_accepted), drafting.num_drafts, tuple(num_accepted),
            waiting.num_tokens, waiting.num_admitted_tokens, num_rows, num_left_tokens, waiting.num_prefill_tokens,
            tenants.num_tokens, tenants.names, manager.prefix_tokens_without_state,
            tuple(manager.sessions.num_computed_tokens),
        ) + (NO_STAGES if encoding is None else (0, 0, encoding.stats(), None)),
    )  # fmt: skip
