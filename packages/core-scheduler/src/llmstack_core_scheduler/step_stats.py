"""The statistics of a step, gathered from the parts of the scheduler."""

from __future__ import annotations

from typing import NamedTuple

from llmstack_core_scheduler.drafting import Drafting
from llmstack_core_scheduler.forking import Forking
from llmstack_core_scheduler.preemptor import Preemptor
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.waiting_queue import WaitingQueue
from llmstack_types import SchedulerStats


class LastStep(NamedTuple):
    """Figures of the last step whose results are known.

    Attributes:
        num_left_tokens: Tokens of its rows' requests that it left for later steps.
    """

    num_tokens: int
    num_rows: int
    num_left_tokens: int


NO_STEP = LastStep(0, 0, 0)


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
) -> SchedulerStats:
    """The state after `step` steps."""
    tenants = waiting.tenants or waiting.update_tenants()
    num_host_blocks = manager.num_host_blocks
    return SchedulerStats(
        step=step,
        num_running=num_running,
        num_waiting=len(waiting.requests),
        num_scheduled_tokens=last.num_tokens,
        num_free_blocks=manager.num_free_blocks,
        num_blocks=manager.num_blocks,
        num_preemptions=preemptor.num_preemptions,
        prefix_cache_queries=manager.prefix_cache_queries,
        prefix_cache_hits=manager.prefix_cache_hits,
        num_swapped=num_swapped,
        num_host_blocks=num_host_blocks,
        num_free_host_blocks=manager.num_free_host_blocks if num_host_blocks else 0,
        num_swap_preemptions=preemptor.num_swaps,
        num_swapped_out_blocks=preemptor.num_swapped_out_blocks,
        num_swapped_in_blocks=preemptor.num_swapped_in_blocks,
        num_forks=forking.num_forks,
        num_drafts=drafting.num_drafts,
        num_draft_tokens=drafting.num_draft_tokens,
        num_accepted_draft_tokens=sum(drafting.num_accepted),
        num_accepted_draft_tokens_per_place=tuple(drafting.num_accepted),
        num_waiting_tokens=waiting.num_tokens,
        num_admitted_tokens=waiting.num_admitted_tokens,
        num_scheduled_rows=last.num_rows,
        num_running_prefill_tokens=last.num_left_tokens,
        num_waiting_prefill_tokens=waiting.num_prefill_tokens,
        num_waiting_tokens_per_tenant=tenants.num_tokens,
        waiting_tenants=tenants.names,
    )
