"""The order in which constraints are compiled."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from llmstack_types import ServerOverloadedError

NUM_QUICK = 2
"""Constraints of the quick lane that are compiled at once; they are not held up by those of the slow lane."""
NUM_SLOW = 2
MAX_WAITING = 512


@dataclass(slots=True)
class Job:
    """A constraint to compile.

    Attributes:
        cost_s: Expected processor time; cheap ones of a tenant go first.
        is_slow: Its lane.
        is_left: No caller waits for it any longer.
    """

    tenant: str
    cost_s: float
    is_slow: bool
    is_left: bool = field(default=False, init=False)


@dataclass(slots=True)
class _Lane:
    """Waiting jobs by tenant, and the number of running ones."""

    num_places: int
    waiting: dict[str, list[tuple[float, int, Job]]] = field(default_factory=dict)
    running: Counter[str] = field(default_factory=Counter)


class CheckQueue:
    """Two lanes of waiting jobs. The tenant that has used least is next, and of its jobs the cheapest.

    One tenant never has all places of a lane: another one finds a place free.
    """

    def __init__(self, used_s: Callable[[str], float], num_quick: int = NUM_QUICK, num_slow: int = NUM_SLOW) -> None:
        """`used_s`: Processor time that a tenant has used lately."""
        self._used_s = used_s
        self._lanes = {False: _Lane(num_quick), True: _Lane(num_slow)}
        self._num_waiting: Counter[str] = Counter()
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Jobs of all tenants that have not begun."""
        return self._num_waiting.total()

    def check_room(self, tenant: str) -> None:
        """Refuses a tenant's further job where it has as many waiting as there is room left.

        Raises:
            ServerOverloadedError: Too many are waiting.
        """
        if self._num_waiting[tenant] >= MAX_WAITING - self.num_waiting:
            raise ServerOverloadedError("too many constraints are being compiled", reason="constraints")

    def add(self, job: Job) -> None:
        """Adds a job to the queue of its lane."""
        waiting = self._lanes[job.is_slow].waiting.setdefault(job.tenant, [])
        heapq.heappush(waiting, (job.cost_s, next(self._numbers), job))
        self._num_waiting[job.tenant] += 1

    def leave(self, job: Job) -> bool:
        """Removes a job that waits; False where it is running already."""
        lane = self._lanes[job.is_slow]
        entries = lane.waiting.get(job.tenant, [])
        kept = [entry for entry in entries if entry[2] is not job]
        if len(kept) == len(entries):
            return False
        heapq.heapify(kept)
        self._keep(lane, job.tenant, kept)
        self._count_out(job.tenant)
        return True

    def take(self) -> list[Job]:
        """The jobs that begin now; `end` follows for each."""
        taken: list[Job] = []
        for lane in self._lanes.values():
            while (job := self._next(lane)) is not None:
                lane.running[job.tenant] += 1
                taken.append(job)
        return taken

    def end(self, job: Job) -> None:
        """Removes a job that was running."""
        running = self._lanes[job.is_slow].running
        running[job.tenant] -= 1
        if not running[job.tenant]:
            del running[job.tenant]

    def _next(self, lane: _Lane) -> Job | None:
        if lane.running.total() >= lane.num_places:
            return None
        most = max(1, lane.num_places - 1)
        tenants = [tenant for tenant in lane.waiting if lane.running[tenant] < most]
        if not tenants:
            return None
        tenant = min(tenants, key=lambda name: (self._used_s(name), lane.waiting[name][0][:2]))
        entries = lane.waiting[tenant]
        job = heapq.heappop(entries)[2]
        self._keep(lane, tenant, entries)
        self._count_out(tenant)
        return job

    def _keep(self, lane: _Lane, tenant: str, entries: list[tuple[float, int, Job]]) -> None:
        if entries:
            lane.waiting[tenant] = entries
        else:
            del lane.waiting[tenant]

    def _count_out(self, tenant: str) -> None:
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
