"""Fair queueing: shares of tenants, no starvation, and first come first served with a single tenant."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

import pytest
from core_scheduler_helpers.fuzz import load_manager
from core_scheduler_helpers.simulation import Simulation
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_core_scheduler import FairPolicy, Request, Scheduler, SchedulerConfig
from llmstack_core_scheduler.fair_queue import MAX_NUM_REPORTED, FairQueue
from llmstack_core_scheduler.testing import DecisionHash, FakeKVCacheManager, FakeModelRunner
from llmstack_core_scheduler.waiting_queue import MAX_NUM_SKIPPED
from llmstack_types import EngineCoreRequest, RequestStatus, SamplingParams

POLICY = FairPolicy()
PLAIN = load_manager("llmstack_core_scheduler.testing:FakeKVCacheManager")
QUANTUM = 10
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=30)


class Rig:
    """A fair queue, whose requests end when the test says so."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self.queue = FairQueue(quantum)
        self.num_arrivals = 0

    def add(self, tenant: str, num_tokens: int, max_tokens: int = 0) -> Request:
        self.num_arrivals += 1
        arrival = EngineCoreRequest(
            f"{tenant}-{self.num_arrivals}", [1] * num_tokens, SamplingParams(max_tokens=max_tokens), tenant=tenant
        )
        request = Request(arrival, POLICY.rank(arrival, self.num_arrivals), num_tokens + max_tokens)
        self.queue.add(request)
        return request

    def admit(self, num_computed_tokens: int = 0) -> Request:
        request = self.queue.order().next()
        assert request is not None
        self.queue.admit(request, num_computed_tokens)
        return request


def tenant_of(request: Request | None) -> str:
    assert request is not None
    return request.arrival.tenant


@given(a=SIZES, b=SIZES, quantum=st.integers(1, 60))
def test_while_both_wait_two_tenants_differ_by_at_most_a_quantum_and_a_request(a, b, quantum):
    rig, served, left = Rig(quantum), Counter(), Counter({"a": len(a), "b": len(b)})
    for index in range(max(len(a), len(b))):  # arrivals alternate, as long as both have any
        for name, sizes in (("a", a), ("b", b)):
            if index < len(sizes):
                rig.add(name, sizes[index])
    while left["a"] and left["b"]:
        request = rig.admit()
        name = tenant_of(request)
        served[name] += len(request.token_ids)
        left[name] -= 1
        assert abs(served["a"] - served["b"]) <= quantum + max(a + b)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    others=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=40),
    num_before=st.integers(0, 40),
)
def test_no_tenant_waits_for_ever(sizes, others, num_before):
    """However many requests the others send, and however many new tenants come while it waits."""
    rig = Rig()
    for number, num_tokens in others:
        rig.add(f"old-{number}", num_tokens)
    for _ in range(min(num_before, len(others) - 1)):
        rig.admit()
    waiting = [rig.add("late", size) for size in sizes]
    for step in range(20_000):
        rig.add(f"old-{step % 5}", 30)
        if step % 3 == 0:
            rig.add(f"new-{step}", 30)
        request = rig.admit()
        if request in waiting:
            waiting.remove(request)
        if not waiting:
            return
    pytest.fail("it waits for ever")


def test_a_tenant_with_one_request_goes_before_the_rest_of_a_long_queue():
    rig = Rig()
    for _ in range(100):
        rig.add("heavy", 10)
    rig.admit()
    rig.add("light", 10)
    admitted = [tenant_of(rig.admit()) for _ in range(3)]
    assert "light" in admitted


def test_a_request_larger_than_the_quantum_is_paid_for_by_later_rounds():
    rig = Rig()
    for _ in range(3):
        rig.add("large", 40)
    for _ in range(12):
        rig.add("small", 10)
    order = [tenant_of(rig.admit()) for _ in range(15)]
    assert [index for index, name in enumerate(order) if name == "large"] == [0, 5, 10]


def test_tokens_that_are_found_in_the_cache_are_not_charged():
    rig = Rig()
    rig.add("a", 40)
    rig.add("a", 40)
    rig.add("b", 10)
    rig.add("b", 10)
    rig.admit(num_computed_tokens=35)
    assert rig.queue.deficit_of("a") == QUANTUM - 5
    assert tenant_of(rig.admit()) == "a"


def test_the_unused_part_of_an_output_is_given_back_at_the_end():
    rig = Rig()
    first = rig.add("a", 1, max_tokens=100)
    rig.add("a", 1)
    rig.admit()
    assert rig.queue.deficit_of("a") == QUANTUM - 1 - QUANTUM  # an output counts with at most a quantum
    first.token_ids += [7, 7]
    rig.queue.finish(first)
    assert rig.queue.deficit_of("a") == QUANTUM - 3


def test_output_beyond_the_charge_is_charged_at_the_end():
    rig = Rig()
    first = rig.add("a", 1, max_tokens=100)
    rig.add("a", 1)
    rig.admit()
    first.token_ids += [7] * 50
    rig.queue.finish(first)
    assert rig.queue.deficit_of("a") == QUANTUM - 51


def test_a_preempted_request_goes_first_and_is_charged_once():
    rig = Rig()
    first = rig.add("a", 33)
    rig.add("b", 5)
    rig.admit()
    debt = rig.queue.deficit_of("a")
    first.status = RequestStatus.PREEMPTED
    rig.queue.add(first)
    assert rig.admit() is first
    assert rig.queue.deficit_of("a") == debt


def test_a_tenant_that_waits_for_nothing_saves_nothing():
    rig = Rig()
    kept = rig.add("idle", 1)
    rig.admit()
    for _ in range(50):
        rig.add("busy", 10)
        rig.admit()
    for _ in range(4):
        rig.add("idle", 10)
        rig.add("busy", 10)
    order = [tenant_of(rig.admit()) for _ in range(8)]
    assert all(order[index : index + 3].count("idle") < 3 for index in range(6))
    rig.queue.finish(kept)


def test_tokens_that_are_left_when_no_request_waits_are_lost():
    rig = Rig()
    rig.add("a", 3)
    rig.admit()
    assert rig.queue.deficit_of("a") == 0


def test_rounds_pay_the_debts_of_a_tenant_without_waiting_requests():
    rig = Rig()
    rig.add("debtor", 95)
    rig.admit()
    assert rig.queue.deficit_of("debtor") == -85
    for _ in range(5):
        rig.add("other", 10)
        rig.admit()
    rig.add("debtor", 1)
    assert rig.queue.deficit_of("debtor") == -85 + 5 * QUANTUM


def test_a_fork_that_begins_at_once_is_charged_what_it_does_not_share():
    rig = Rig()
    arrival = EngineCoreRequest("child", [1] * 20, SamplingParams(max_tokens=4), tenant="a")
    child = Request(arrival, POLICY.rank(arrival, 0), 24)
    rig.queue.join(child, 18)
    assert (rig.queue.deficit_of("a"), child.num_paid_tokens) == (-6, 24)
    child.token_ids.append(7)
    rig.queue.finish(child)
    assert rig.queue.deficit_of("a") == 0


def test_only_so_many_requests_are_overtaken_in_a_step():
    rig = Rig()
    for number in range(MAX_NUM_SKIPPED + 3):
        rig.add(f"t{number % 3}", 1)
    order = rig.queue.order()
    for _ in range(MAX_NUM_SKIPPED + 1):
        request = order.next()
        assert request is not None
        order.skip(request)
    assert order.next() is None


def test_a_tenant_is_forgotten_with_its_last_request():
    rig = Rig()
    waiting, running = rig.add("a", 30), rig.add("a", 30)
    assert rig.admit() is waiting
    rig.queue.remove(running)
    rig.queue.finish(running)
    assert rig.queue.deficit_of("a") < 0
    rig.queue.finish(waiting)
    assert (rig.queue.deficit_of("a"), rig.queue.update_tenants(), len(rig.queue)) == (0, ((), ()), 0)


def test_the_largest_tenants_are_reported():
    rig = Rig()
    for number in range(MAX_NUM_REPORTED + 5):
        rig.add(f"t{number}", number + 1)
    names, num_tokens = rig.queue.update_tenants()
    assert (len(names), names[0], num_tokens[0]) == (MAX_NUM_REPORTED, f"t{MAX_NUM_REPORTED + 4}", MAX_NUM_REPORTED + 5)


def test_a_skipped_request_is_overtaken_within_one_step_only():
    rig = Rig()
    first, second, other = rig.add("a", 1), rig.add("a", 1), rig.add("b", 1)
    order = rig.queue.order()
    assert order.next() is first
    order.skip(first)
    assert order.next() is second
    order.skip(second)
    assert order.next() is other
    order.skip(other)
    assert order.next() is None
    assert rig.queue.order().next() is first


class OneTenant(Simulation):
    """A simulation whose requests all belong to one tenant, under a given policy."""

    def __init__(self, seed: int, policy: str) -> None:
        super().__init__(seed, PLAIN)
        self.config = replace(self.config, policy=policy)
        self._boot()

    def _request(self, *arguments, **named):
        return replace(super()._request(*arguments, **named), tenant="")


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32))
def test_with_a_single_tenant_every_decision_is_that_of_fcfs(seed):
    """With preemption, forks, aborts, crashes, drafts and steps under way."""
    runs = [OneTenant(seed, policy) for policy in ("fcfs", "fair")]
    for run in runs:
        run.run()
    assert runs[0].decisions.hexdigest() == runs[1].decisions.hexdigest()


@pytest.mark.full
@pytest.mark.parametrize("first_seed", range(0, 400, 100))
def test_with_a_single_tenant_400_runs_are_those_of_fcfs(first_seed):
    for seed in range(first_seed, first_seed + 100):
        runs = [OneTenant(seed, policy) for policy in ("fcfs", "fair")]
        for run in runs:
            run.run()
        assert runs[0].decisions.hexdigest() == runs[1].decisions.hexdigest(), seed


def run_scheduler(arrivals: list[EngineCoreRequest]) -> tuple[str, list[str]]:
    """The decisions, and the order in which requests begin."""
    cache = FakeKVCacheManager(64, 4)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, policy="fair", fair_quantum=8),
        cache,
    )
    runner, decisions, begun, coming = FakeModelRunner(64, 4), DecisionHash(), [], deque(arrivals)
    while coming or scheduler.has_unfinished_requests():
        for _ in range(min(4, len(coming))):
            scheduler.add_request(coming.popleft())
        scheduled = scheduler.schedule(0.0)
        decisions.add(scheduled)
        begun += [request.request_id for request in scheduled.new_requests]
        scheduler.update_from_output(scheduled, runner.execute_model(scheduled), 0.0)
    return decisions.hexdigest(), begun


def test_the_same_calls_give_the_same_shares_and_the_scheduler_mixes_tenants():
    arrivals = [
        EngineCoreRequest(f"{tenant}{number}", [number, 1, 2], SamplingParams(max_tokens=4), tenant=tenant)
        for tenant, num_requests in (("heavy", 20), ("light", 3))
        for number in range(num_requests)
    ]
    digest, begun = run_scheduler(arrivals)
    assert run_scheduler(arrivals) == (digest, begun)
    # All of `heavy` arrived first, and waits for those of `light` in turn.
    assert begun.index("light2") < begun.index("heavy19")
    assert set(begun) == {request.request_id for request in arrivals}
