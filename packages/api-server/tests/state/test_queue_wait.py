"""The predicted wait: what is admitted before a new request, at the measured rate."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm.outputs.stats import FinishedRequestStats, IterationStats
from llmstack_server.state import queue_monitor
from llmstack_server.state.queue_monitor import REPORT_TIMEOUT_S, DrainRate, QueueMonitor
from llmstack_server.state.queue_wait import MAX_WAIT_S, QueueState, predict_wait
from llmstack_types import RequestProgress, SchedulerStats, StepPhases

TENANTS = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 10_000), max_size=5)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """A monitor, and an engine core that admits `rate` tokens per second while it has a queue."""

    def __init__(self, max_num_running: int = 4, quantum: int = 0) -> None:
        self.clock = Clock()
        self.monitor = QueueMonitor(max_num_running, quantum, self.clock)
        self.num_admitted = 0

    def report(self, num_waiting: int, *, rate: float = 0.0, duration_s: float = 0.1, engine: int = 0, **named) -> None:
        self.clock.now_s += duration_s
        self.num_admitted += round(rate * duration_s)
        stats = SchedulerStats(num_waiting_tokens=num_waiting, num_admitted_tokens=self.num_admitted, **named)
        phases = StepPhases(0.0, duration_s, 0.0)
        self.monitor.record(stats, IterationStats(timestamp_s=self.clock.now_s, phases=phases, engine_index=engine))

    def calibrate(self, rate: float = 1000.0) -> None:
        for _ in range(10):
            self.report(5000, rate=rate)


def test_nothing_is_predicted_before_a_rate_was_measured():
    rig = Rig()
    assert rig.monitor.predict_wait(10, "") is None
    rig.report(5000)
    rig.report(5000, rate=1000)
    assert rig.monitor.predict_wait(10, "") is None
    rig.calibrate()
    assert rig.monitor.predict_wait(10, "") == pytest.approx(5.0, rel=0.3)


async def test_a_waiter_wakes_with_the_report_that_nothing_waits_any_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queue_monitor, "REPORT_TIMEOUT_S", 3600.0)
    rig = Rig()
    rig.calibrate()
    assert rig.monitor.is_busy
    waiters = [asyncio.ensure_future(rig.monitor.wait_until_drained()) for _ in range(2)]
    await asyncio.sleep(0)
    waiters[0].cancel()  # the other one waits on
    rig.report(100, rate=1000)
    await asyncio.sleep(0)
    assert not waiters[1].done()
    rig.report(0, rate=1000)
    await waiters[1]
    assert not rig.monitor.is_busy
    assert rig.monitor.is_idle
    rig.report(0)  # nothing waits for this one


async def test_a_waiter_does_not_wait_for_a_report_that_never_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queue_monitor, "REPORT_TIMEOUT_S", 0.01)
    rig = Rig()
    rig.calibrate()
    await rig.monitor.wait_until_drained()
    assert rig.monitor.is_busy


def test_time_without_waiting_requests_says_nothing_about_the_rate():
    rig = Rig()
    for _ in range(50):
        rig.report(0, rate=10)
    assert rig.monitor.predict_wait(10, "") is None
    rig.calibrate(rate=1000)
    known = rig.monitor.state().tokens_per_s
    rig.report(0)  # those that waited were aborted
    for _ in range(50):
        rig.report(0, rate=10)
    assert rig.monitor.state().tokens_per_s == known


def test_an_empty_queue_means_no_wait():
    rig = Rig()
    rig.calibrate()
    rig.report(0)
    assert rig.monitor.predict_wait(100_000, "") == 0.0


def test_bursts_of_admissions_do_not_move_the_rate_much():
    """Requests that begin together end together: all of a second's tokens are admitted in one step."""
    rig = Rig()
    rates = []
    for step in range(400):
        rig.report(5000, rate=10_000 if step % 10 == 0 else 0)
        rates.append(rig.monitor.state().tokens_per_s)
    assert all(rate == pytest.approx(1000, rel=0.2) for rate in rates[100:])


def test_long_services_are_averaged_over_a_longer_time():
    rig = Rig()
    finished = FinishedRequestStats("length", 30.0, 1, 1, inference_time_s=30.0)
    for _ in range(200):
        rig.monitor.record(None, IterationStats(finished_requests=[finished]))
    rates = []
    for step in range(600):
        rig.report(5000, rate=30_000 if step % 30 == 0 else 0, duration_s=1.0)
        rates.append(rig.monitor.state().tokens_per_s)
    assert all(rate == pytest.approx(1000, rel=0.3) for rate in rates[200:])


def test_a_replaced_engine_core_begins_its_counters_again():
    rate = DrainRate()
    for step in range(20):
        rate.observe(SchedulerStats(num_waiting_tokens=9, num_admitted_tokens=100 * step), step * 0.1, 5.0)
    before = rate.tokens_per_s
    rate.observe(SchedulerStats(num_waiting_tokens=9, num_admitted_tokens=3), 2.0, 5.0)
    assert rate.tokens_per_s == before


def test_several_engine_cores_drain_together():
    rig = Rig()
    rig.calibrate()
    alone = rig.monitor.state().tokens_per_s
    rig.report(0, engine=1)
    assert rig.monitor.state().tokens_per_s == pytest.approx(2 * alone)


def test_a_report_ages():
    rig = Rig()
    rig.calibrate()
    before = rig.monitor.predict_wait(0, "")
    rig.clock.now_s += 2.0
    assert rig.monitor.predict_wait(0, "") == pytest.approx(before - 2.0)
    rig.clock.now_s += 100.0
    assert rig.monitor.predict_wait(0, "") == 0.0


def test_requests_on_their_way_count_until_a_report_has_them():
    rig = Rig()
    rig.calibrate()
    before = rig.monitor.predict_wait(0, "")
    with rig.monitor.pending(1000, ""):
        assert rig.monitor.predict_wait(0, "") == pytest.approx(before + 1.0, rel=0.1)
        rig.monitor.note_submitted(1500, 500)
        assert rig.monitor.predict_wait(0, "") == pytest.approx(before + 2.0, rel=0.1)
        rig.report(5000, rate=1000, duration_s=0.01)  # its step began before the request came
        assert rig.monitor.predict_wait(0, "") == pytest.approx(before + 2.0, rel=0.1)
    with rig.monitor.pending(1000, ""):
        rig.monitor.note_submitted(500, 500)
        rig.clock.now_s += 0.1
        rig.report(5000, rate=1000)
        assert rig.monitor.state().num_waiting_tokens == 5000


def test_a_request_that_ends_before_it_is_submitted_is_forgotten():
    rig = Rig()
    rig.calibrate()
    with pytest.raises(RuntimeError), rig.monitor.pending(1000, ""):
        raise RuntimeError
    assert rig.monitor.state().num_waiting_tokens == 5000


def test_no_report_for_long_does_not_count_submitted_requests_for_ever():
    rig = Rig()
    rig.calibrate()
    with rig.monitor.pending(1000, ""):
        rig.monitor.note_submitted(500, 500)
        rig.clock.now_s += 2 * REPORT_TIMEOUT_S
        assert rig.monitor.state().num_waiting_tokens == 5000


def test_free_places_are_not_waited_for():
    rig = Rig(max_num_running=4)
    rig.calibrate()
    rig.report(0, num_running=2)
    with rig.monitor.pending(1000, ""), rig.monitor.pending(1000, ""):
        assert rig.monitor.predict_wait(10, "") == 0.0
        with rig.monitor.pending(1000, ""):
            assert rig.monitor.state().num_waiting_tokens == 1000


def test_a_request_waits_where_all_places_are_taken_and_no_other_waits_yet():
    rig = Rig(max_num_running=2)
    for number in range(60):
        rig.report(0, step=number + 1, num_running=2, num_scheduled_rows=2, num_scheduled_tokens=2 + 50 * (number % 3))
    rig.monitor.first_tokens.progress = lambda _: [RequestProgress(9, 1, 21, can_stop=False)] * 2
    rig.report(0, step=61, num_running=2, num_scheduled_rows=2, num_scheduled_tokens=2)
    assert rig.monitor.predict_wait(10, "") == pytest.approx(20 * 0.1, rel=0.05)
    rig.report(0, step=62, num_running=1, num_scheduled_rows=2, num_scheduled_tokens=2)
    assert rig.monitor.predict_wait(10, "") == 0.0


def test_sizes_are_learned_from_submitted_requests():
    monitor = QueueMonitor()
    for _ in range(500):
        with monitor.pending(0, "", 8000):
            monitor.note_submitted(1000, 30)
    assert monitor.sizes.estimate(8000) == pytest.approx(1030, rel=0.1)
    assert monitor.sizes.estimate(80_000) == pytest.approx(10_030, rel=0.1)


@given(TENANTS, st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 2000))
def test_in_fair_shares_no_request_waits_longer_than_behind_all(tenant_to_tokens, num_unnamed, tokens, quantum):
    num_waiting = sum(tenant_to_tokens.values()) + num_unnamed
    fair = QueueState(100.0, num_waiting, tenant_to_tokens, quantum)
    by_arrival = QueueState(100.0, num_waiting)
    waits = {name: predict_wait(fair, tokens, name) for name in "abcdef"}
    assert all(wait <= predict_wait(by_arrival, tokens, "") for wait in waits.values())
    for name, wait in waits.items():  # its own requests are before it in any case
        assert wait >= tenant_to_tokens.get(name, 0) / 100.0
    assert waits["f"] == min(waits.values())


def test_a_tenant_without_a_queue_waits_for_a_share_of_the_others_only():
    state = QueueState(1000.0, 100_000, {"heavy": 100_000}, quantum=2000)
    assert predict_wait(state, 500, "light") == pytest.approx(2.5)
    assert predict_wait(state, 500, "heavy") == pytest.approx(100.0)


def test_a_rate_of_nothing_predicts_a_finite_wait():
    assert predict_wait(QueueState(0.0, 10), 1, "") == MAX_WAIT_S
