"""Preemption of running requests, and the measured costs of recompute and swap."""

from __future__ import annotations

from llmstack_core_scheduler.preemption import PreemptionPolicy
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_types import RequestStatus, SchedulerOutput


class Preemptor:
    """Carries out preemptions.

    Attributes:
        num_preemptions: Counter of all of them.
        num_swaps: Counter of those that moved blocks to the host.
        num_swapped_out_blocks: Counter of these blocks.
        num_swapped_in_blocks: Counter of those that were swapped in.
    """

    def __init__(self, policy: PreemptionPolicy, max_num_preemptions: int, manager: KVCacheManager) -> None:
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_swapped_out_blocks = 0
        self.num_swapped_in_blocks = 0
        self._policy = policy
        self._max_num_preemptions = max_num_preemptions
        self._manager = manager
        self._has_host_blocks = manager.num_host_blocks > 0
        self._end_s = 0.0

    def preempt(
        self, victim: Request, plan: StepPlan, step: int, *, can_swap: bool, yields_place: bool = False
    ) -> None:
        """Takes all blocks of a running request. `step` is the last one scheduled.

        `can_swap` is False where blocks lack their content still, since it is copied in the step that is being made,
        and where the runner's row holds more than they do.
        `yields_place`: It makes a place, not blocks: what it has computed stays in the prefix cache. That counts
        nothing towards its protection. The oldest row of a tenant never yields, so all its requests come to their end.
        """
        self.num_preemptions += 1
        if yields_place:
            self._manager.free(victim.request_id)
            victim.lose_kv(step, RequestStatus.YIELDED)
            return
        plan.has_preempted = True
        victim.num_preemptions += 1
        victim.is_protected = victim.num_preemptions >= self._max_num_preemptions
        if not (can_swap and self._has_host_blocks and self._swap_out(victim, plan)):
            self._manager.free(victim.request_id)
            victim.lose_kv(step)

    def observe(self, scheduled: SchedulerOutput, start_s: float, end_s: float) -> None:
        """Learns from a step; one that was scheduled ahead is counted from the end of the one before."""
        num_copied_blocks = len(scheduled.swap_outs) + len(scheduled.swap_ins)
        duration_s = end_s - max(start_s, self._end_s)
        num_rows = len(scheduled.scheduled_requests)
        self._policy.observe(scheduled.total_num_scheduled_tokens, num_rows, num_copied_blocks, duration_s)
        self._end_s = end_s

    def _swap_out(self, victim: Request, plan: StepPlan) -> bool:
        num_blocks = self._manager.num_held_blocks(victim.request_id)
        if not self._policy.prefers_swap(victim.num_computed_tokens, num_blocks):
            return False
        swap_outs = self._manager.swap_out(victim.request_id)
        if swap_outs is None:
            return False
        plan.swap_outs += swap_outs
        victim.swap_out()
        self.num_swaps += 1
        self.num_swapped_out_blocks += len(swap_outs)
        return True
