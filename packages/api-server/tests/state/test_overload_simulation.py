"""Admission by predicted wait over the real scheduler, in virtual time: goodput, waits, and shares of keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager, FakeModelRunner
from llmstack_llm.outputs.stats import IterationStats
from llmstack_server.state.queue_monitor import QueueMonitor
from llmstack_types import EngineCoreRequest, SamplingParams

SEATS, STEP_S, BLOCK_SIZE, NUM_BLOCKS = 8, 0.025, 16, 256
CAPACITY_PER_S = SEATS / (21 * STEP_S)
"""Requests per second: one of 12 to 28 output tokens takes about 21 steps."""


@dataclass
class Request:
    tenant: str
    arrival_s: float
    first_s: float | None = None
    is_done: bool = False


@dataclass
class Server:
    """A scheduler whose steps take `STEP_S` of virtual time, and a monitor that decides who may enter."""

    max_wait_s: float
    policy: str = "fair"
    now_s: float = 0.0
    requests: dict[str, Request] = field(default_factory=dict)
    refused: list[tuple[str, float]] = field(default_factory=list)
    num_sent: int = 0

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_num_seqs=SEATS, max_num_batched_tokens=256, max_model_len=128, policy=self.policy, fair_quantum=64
        )
        self.scheduler = Scheduler(config, FakeKVCacheManager(NUM_BLOCKS, BLOCK_SIZE))
        self.runner = FakeModelRunner(NUM_BLOCKS, BLOCK_SIZE)
        self.monitor = QueueMonitor(SEATS, 64 if self.policy == "fair" else 0, lambda: self.now_s)
        self.random = Random(7)

    def send(self, tenant: str) -> None:
        self.num_sent += 1
        num_prompt, num_output = self.random.randint(4, 30), self.random.randint(12, 28)
        wait_s = self.monitor.predict_wait(num_prompt + num_output, tenant)
        if wait_s is not None and wait_s > self.max_wait_s:
            self.refused.append((tenant, wait_s))
            return
        request_id = str(self.num_sent)
        self.requests[request_id] = Request(tenant, self.now_s)
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        prompt = [self.random.randrange(1000) for _ in range(num_prompt)]
        with self.monitor.pending(num_prompt + num_output, tenant):
            self.scheduler.add_request(
                EngineCoreRequest(request_id, prompt, params, arrival_time_s=self.now_s, tenant=tenant)
            )

    def run(self, duration_s: float, **rate_per_s: float) -> None:
        """Steps, with random arrivals of each tenant between them."""
        end_s = self.now_s + duration_s
        next_s = {tenant: self.now_s + self.random.expovariate(rate) for tenant, rate in rate_per_s.items()}
        while self.now_s < end_s:
            scheduled = self.scheduler.schedule(self.now_s)
            output = self.runner.execute_model(scheduled)
            step_end_s = self.now_s + STEP_S
            for tenant, rate in rate_per_s.items():
                while next_s[tenant] < step_end_s:
                    self.now_s = next_s[tenant]
                    self.send(tenant)
                    next_s[tenant] += self.random.expovariate(rate)
            self.now_s = step_end_s
            self.finish_step(scheduled, output)

    def finish_step(self, scheduled, output) -> None:
        outputs = self.scheduler.update_from_output(scheduled, output, self.now_s)
        for one in outputs.outputs:
            request = self.requests[one.request_id]
            request.first_s = request.first_s or self.now_s
            request.is_done = one.finish_reason is not None
        self.monitor.record(outputs.scheduler_stats, IterationStats(timestamp_s=self.now_s))

    def drain(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.run(STEP_S)

    def goodput(self, since_s: float, ttft_s: float, tenant: str = "") -> float:
        """Requests per second with a first token in time."""
        good = [
            one
            for one in self.requests.values()
            if one.first_s and one.first_s > since_s and one.first_s - one.arrival_s <= ttft_s
            if tenant in ("", one.tenant)
        ]
        return len(good) / (self.now_s - since_s)


def overloaded(max_wait_s: float, ttft_s: float, duration_s: float) -> tuple[Server, float]:
    """A server after ten times its capacity, and the goodput over the capacity meanwhile."""
    server = Server(max_wait_s)
    server.run(10.0, a=1.2 * CAPACITY_PER_S)  # measures the rate
    since_s = server.now_s
    server.run(duration_s, a=10 * CAPACITY_PER_S)
    return server, server.goodput(since_s, ttft_s) / CAPACITY_PER_S


@pytest.mark.parametrize(
    ("max_wait_s", "ttft_s", "duration_s"),
    [
        (1.5, 2.0, 30.0),
        pytest.param(30.0, 32.0, 60.0, marks=pytest.mark.full),
    ],
)
def test_at_ten_times_capacity_goodput_is_that_of_the_peak(max_wait_s, ttft_s, duration_s):
    server, share = overloaded(max_wait_s, ttft_s, duration_s)
    assert share >= 0.95
    assert all(wait_s > max_wait_s for _, wait_s in server.refused)
    server.drain()
    assert all(one.is_done for one in server.requests.values())
    waits = [one.first_s - one.arrival_s for one in server.requests.values() if one.first_s]
    assert max(waits) < 1.4 * max_wait_s + 0.5


def test_without_the_limit_goodput_collapses():
    _, share = overloaded(1e9, 2.0, 10.0)
    assert share < 0.5


def test_a_key_below_its_share_is_neither_refused_nor_delayed_beside_one_at_ten_times_capacity():
    server = Server(5.0)
    server.run(10.0, heavy=1.2 * CAPACITY_PER_S)
    since_s = server.now_s
    server.run(30.0, heavy=10 * CAPACITY_PER_S, light=0.2 * CAPACITY_PER_S)
    assert "light" not in [tenant for tenant, _ in server.refused]
    assert "heavy" in [tenant for tenant, _ in server.refused]
    server.drain()
    waits = [one.first_s - one.arrival_s for one in server.requests.values() if one.tenant == "light" and one.first_s]
    assert len(waits) > 30
    assert max(waits) < 2.0
    assert server.goodput(since_s, 8.0, "heavy") > 0


def test_two_keys_that_ask_for_too_much_get_the_same():
    server = Server(5.0)
    server.run(5.0, a=2 * CAPACITY_PER_S)
    since_s = server.now_s
    server.run(40.0, a=10 * CAPACITY_PER_S, b=3 * CAPACITY_PER_S)
    shares = [server.goodput(since_s, 60.0, tenant) for tenant in "ab"]
    assert shares[1] == pytest.approx(shares[0], rel=0.2)


def test_by_arrival_a_light_key_waits_as_long_as_a_heavy_one():
    """What fair shares change: this test's figures are those of the policy `fcfs`."""
    server = Server(5.0, policy="fcfs")
    server.run(10.0, heavy=1.2 * CAPACITY_PER_S)
    server.run(30.0, heavy=10 * CAPACITY_PER_S, light=0.2 * CAPACITY_PER_S)
    assert "light" in [tenant for tenant, _ in server.refused]
