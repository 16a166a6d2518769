"""Deadlines: the earliest first within a tenant, fair shares between tenants, and no starvation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_core_scheduler import DeadlinePolicy, FairPolicy, Request, Scheduler, SchedulerConfig
from llmstack_core_scheduler.deadline_queue import DeadlineQueue
from llmstack_core_scheduler.fair_queue import FairQueue
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner
from llmstack_types import EngineCoreRequest, SamplingParams
from llmstack_types.engine_core import IMPLIED_DEADLINE_S

QUANTUM = 10
ARRIVALS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.none() | st.integers(1, 90)), min_size=1, max_size=30
)


class Rig:
    """A queue whose requests end when the test says so, on the test's clock."""

    def __init__(self, policy: FairPolicy | None = None) -> None:
        self.policy = policy or DeadlinePolicy()
        self.queue = DeadlineQueue(QUANTUM) if isinstance(self.policy, DeadlinePolicy) else FairQueue(QUANTUM)
        self.num_arrivals = 0
        self.now_s = 0.0

    def add(self, tenant: str, num_tokens: int = 10, left_s: float | None = None) -> Request:
        self.num_arrivals += 1
        arrival = EngineCoreRequest(
            f"{tenant}-{self.num_arrivals}",
            [1] * num_tokens,
            SamplingParams(max_tokens=0),
            arrival_time_s=self.now_s,
            tenant=tenant,
            deadline_s=None if left_s is None else self.now_s + left_s,
        )
        request = Request(arrival, self.policy.rank(arrival, self.num_arrivals), num_tokens)
        self.queue.add(request)
        return request

    def admit(self) -> Request:
        request = self.queue.order(self.now_s).next()
        assert request is not None
        self.queue.admit(request, 0)
        return request


def wanted_s(request: Request) -> float:
    arrival = request.arrival
    return arrival.arrival_time_s + IMPLIED_DEADLINE_S if arrival.deadline_s is None else arrival.deadline_s


@given(ARRIVALS)
def test_within_a_tenant_the_earliest_deadline_goes_first(arrivals):
    rig = Rig()
    for tenant, num_tokens, left_s in arrivals:
        rig.add(tenant, num_tokens, left_s)
    admitted = [rig.admit() for _ in arrivals]
    for name in "abc":
        own = [wanted_s(request) for request in admitted if request.arrival.tenant == name]
        assert own == sorted(own)


@given(ARRIVALS, st.lists(st.integers(0, 8), min_size=30, max_size=30))
def test_the_shares_of_tenants_do_not_depend_on_deadlines(arrivals, pauses):
    """With requests of one size for each tenant, tenants are admitted in the same order, with the same deficits."""
    sizes = {"a": 7, "b": 10, "c": 23}
    fair, by_deadline = Rig(FairPolicy()), Rig()
    for tenant, _, left_s in arrivals:
        fair.add(tenant, sizes[tenant])
        by_deadline.add(tenant, sizes[tenant], left_s)
    for _, pause_s in zip(arrivals, pauses, strict=False):
        by_deadline.now_s += pause_s  # some deadlines pass
        assert fair.admit().arrival.tenant == by_deadline.admit().arrival.tenant
        assert [fair.queue.deficit_of(name) for name in sizes] == [by_deadline.queue.deficit_of(n) for n in sizes]


def test_a_deadline_that_has_passed_delays_none_that_can_be_met():
    rig = Rig()
    missed, met, plain = rig.add("a", left_s=1), rig.add("a", left_s=5), rig.add("a")
    rig.now_s = 2.0
    assert [rig.admit() for _ in range(3)] == [met, missed, plain]
    assert rig.queue.num_missed == 1
    assert len(rig.queue) == 0


@pytest.mark.parametrize("left_s", [None, 0.5, 20.0])
def test_no_request_waits_for_ever_behind_urgent_ones(left_s):
    rig = Rig()
    late = rig.add("a", left_s=left_s)
    for _ in range(100):
        rig.now_s += 1.0
        rig.add("a", left_s=0.9)
        rig.add("b", left_s=0.1)
        if late in (rig.admit(), rig.admit(), rig.admit()):
            return
    pytest.fail("it waits for ever")


@given(ARRIVALS, st.data())
def test_requests_that_leave_the_queue_leave_nothing_behind(arrivals, data):
    rig = Rig()
    waiting = [rig.add(*arrival) for arrival in arrivals]
    while waiting:
        rig.now_s += data.draw(st.integers(0, 20))
        if data.draw(st.booleans()):
            request = waiting[data.draw(st.integers(0, len(waiting) - 1))]
            rig.queue.remove(request)
        else:
            request = rig.admit()
        rig.queue.finish(request)
        waiting.remove(request)
    assert (len(rig.queue), rig.queue.num_tokens, rig.queue.order(1000.0).next()) == (0, 0, None)


def test_a_preempted_request_keeps_its_rank_after_its_deadline():
    rig = Rig()
    request = rig.add("a", left_s=1)
    assert rig.admit() is request
    rank = request.rank
    rig.queue.add(request)  # preempted
    rig.now_s = 5.0
    assert rig.admit() is request
    assert request.rank == rank


def test_the_scheduler_takes_the_time_of_its_step():
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64, policy="deadline"),
        FakeKVCacheManager(16, 4),
    )
    runner, first_ids = FakeModelRunner(16, 4), []
    params = SamplingParams(max_tokens=1, seed=0)
    for name, deadline_s in (("plain", None), ("late", 9.0), ("missed", 4.0), ("early", 6.0)):
        scheduler.add_request(EngineCoreRequest(name, [1, 2], params, deadline_s=deadline_s))
    now_s = 5.0
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(now_s)
        first_ids += [row.request_id for row in scheduled.scheduled_requests]
        scheduler.update_from_output(scheduled, runner.execute_model(scheduled), now_s)
    assert first_ids == ["early", "late", "plain", "missed"]  # of those without a deadline, by arrival
