"""Predicted first tokens from reports and from what was submitted: known queues, shares of keys, deadlines."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_engine_client.prediction import MAX_NUM_COUNTED, FirstToken, StepLimits
from llmstack_llm.outputs.stats import IterationStats
from llmstack_server.state.first_tokens import FirstTokens, PendingRequest
from llmstack_types import RequestProgress, SamplingParams, SchedulerStats, StepPhases
from llmstack_types.stats import DiskCacheStats

LIMITS = StepLimits(max_num_rows=4096, max_num_tokens=101)
# Ten milliseconds per prompt token, and a second per step.
BASE_S, TOKEN_S = 1.0, 0.01


class Rig:
    """One engine core that computes 100 prompt tokens per step beside one decode."""

    def __init__(self, quantum: int = 0, *, has_deadlines: bool = False, max_num_rows: int = 4096) -> None:
        limits = LIMITS._replace(max_num_rows=max_num_rows)
        self.first_tokens = FirstTokens(limits, quantum, has_deadlines=has_deadlines)
        self.now_s = 100.0
        self.step = 0
        for number in range(40):
            self.report(num_prompt_tokens=50 * (number % 3))

    def report(self, num_prompt_tokens: int = 0, engine: int = 0, **named: Any) -> None:
        seconds = BASE_S + TOKEN_S * num_prompt_tokens
        self.now_s += seconds
        self.step += 1
        values = {"num_running": 1, "num_scheduled_rows": 1, "num_scheduled_tokens": num_prompt_tokens + 1, **named}
        stats = SchedulerStats(step=self.step, **values)
        phases = StepPhases(0.0, seconds, 0.0)
        iteration = IterationStats(timestamp_s=self.now_s, phases=phases, engine_index=engine)
        self.first_tokens.observe(stats, iteration, self.now_s)

    def submit(self, num_tokens: int, tenant: str = "", left_s: float | None = None) -> PendingRequest:
        wanted_s = None if left_s is None else self.now_s + left_s
        request = PendingRequest(num_tokens, tenant, None, num_tokens, self.now_s, wanted_s)
        self.first_tokens.submit(request, self.now_s)
        return request

    def predict(self, num_tokens: int = 50, tenant: str = "", left_s: float | None = None) -> FirstToken:
        wanted_s = None if left_s is None else self.now_s + left_s
        found = self.first_tokens.predict(num_tokens, num_tokens, tenant, wanted_s, self.now_s)
        assert found is not None
        return found


def test_nothing_is_predicted_before_steps_were_measured():
    assert FirstTokens(LIMITS, 0).predict(10, 10, "", None, 0.0) is None


def test_a_request_waits_for_the_step_under_way_and_for_those_before_it():
    rig = Rig()
    assert rig.predict() == pytest.approx((1.0, 2.5), rel=0.02)
    rig.now_s += 0.5
    rig.submit(300)  # the step has begun without it
    assert rig.predict().wait_s == pytest.approx(0.5 + 6.0, rel=0.02)


def test_a_request_with_its_first_token_delays_no_other():
    rig = Rig()
    before = rig.predict()
    rig.first_tokens.note_first(rig.submit(250), 3.0)
    assert rig.predict().wait_s == pytest.approx(before.wait_s)
    rig.first_tokens.queued.pop(id(rig.submit(250)))
    assert rig.predict().wait_s == pytest.approx(before.wait_s)


def test_a_report_says_which_of_the_submitted_requests_wait():
    """Of two that were submitted the first runs and has 40 tokens left, the second waits."""
    rig = Rig()
    rig.submit(140)
    rig.submit(200)
    rig.now_s += 0.001
    rig.report(num_prompt_tokens=100, num_running=2, num_running_prefill_tokens=40, num_waiting=1,
               num_waiting_prefill_tokens=200)  # fmt: skip
    # 99 of the 240 tokens are in the step under way, which two rows share.
    assert rig.predict().wait_s == pytest.approx(1.99 + 1.99, rel=0.02)


def test_what_other_processes_have_submitted_is_known_from_reports():
    rig = Rig()
    rig.report(num_waiting=3, num_waiting_prefill_tokens=500, num_running=1)
    assert rig.predict().wait_s == pytest.approx(5 * 2.0, rel=0.03)


def test_a_key_with_nothing_waiting_goes_before_the_rest_of_a_long_queue():
    rig = Rig(quantum=100)
    rig.now_s += 0.001
    for _ in range(20):
        rig.submit(100, "heavy")
    assert rig.predict(tenant="heavy").wait_s == pytest.approx(1.0 + 20 * 2.0, rel=0.03)
    assert rig.predict(tenant="light").wait_s == pytest.approx(1.0 + 2.0, rel=0.05)


def test_an_earlier_deadline_does_not_wait_for_later_ones_of_its_key():
    rig = Rig(quantum=100, has_deadlines=True)
    rig.now_s += 0.001
    for left_s in (5.0, 60.0, None):
        rig.submit(300, "a", left_s)
    assert rig.predict(tenant="a", left_s=1.0).wait_s == pytest.approx(1.0, rel=0.05)
    assert rig.predict(tenant="a", left_s=20.0).wait_s == pytest.approx(1.0 + 3 * 2.0, rel=0.05)
    assert rig.predict(tenant="a").wait_s == pytest.approx(1.0 + 6 * 2.0, rel=0.05)
    assert rig.predict(tenant="a", left_s=90.0).wait_s == pytest.approx(1.0 + 9 * 2.0, rel=0.05)


def test_a_long_queue_is_not_looked_through():
    rig = Rig()
    for _ in range(4 * MAX_NUM_COUNTED):
        rig.submit(100)
    rig.now_s += 0.001
    rig.report(num_waiting=4 * MAX_NUM_COUNTED, num_waiting_prefill_tokens=400 * MAX_NUM_COUNTED)
    assert rig.predict().wait_s == pytest.approx(8 * MAX_NUM_COUNTED, rel=0.05)


def test_requests_are_blocked_where_places_or_blocks_are_missing_and_not_behind_prompts():
    rig = Rig()
    for running, left, is_blocked in ((4096, 10, True), (3, 0, True), (3, 10, False)):
        rig.report(num_running=running, num_running_prefill_tokens=left, num_waiting=2)
        assert rig.first_tokens.is_blocked == is_blocked
    rig.report()
    assert not rig.first_tokens.is_blocked


class FullRig(Rig):
    """Both places of the engine core are taken, by answers that have 30 and 80 tokens left."""

    def __init__(self, quantum: int = 0) -> None:
        super().__init__(quantum, max_num_rows=2)
        self.in_flight = [RequestProgress(9, 20, 100, can_stop=False), RequestProgress(9, 70, 100, can_stop=False)]
        self.first_tokens.progress = lambda number: self.in_flight[:number]
        self.fill()

    def fill(self, num_waiting: int = 0) -> None:
        for _ in range(40):
            self.report(num_running=2, num_scheduled_rows=2, num_scheduled_tokens=2, num_waiting=num_waiting)


def test_a_place_is_free_when_a_known_answer_reaches_its_limit():
    rig = FullRig()
    assert rig.predict().wait_s == pytest.approx(30.0, rel=0.02)


def test_what_was_submitted_since_the_report_takes_its_place_first():
    rig = FullRig()
    rig.predict()  # the places are known from here on
    request = PendingRequest(50, "", None, 50, rig.now_s)
    rig.first_tokens.submit(request, rig.now_s, SamplingParams(max_tokens=20, ignore_eos=True))
    assert rig.predict().wait_s == pytest.approx(50.5, rel=0.02)
    rig.in_flight = [RequestProgress(9, 90, 100, can_stop=False)] * 2
    rig.fill()
    assert rig.predict().wait_s == pytest.approx(10.0, rel=0.02)


def test_known_places_are_no_block():
    rig = FullRig()
    rig.fill(num_waiting=3)
    assert not rig.first_tokens.is_blocked
    rig.report(num_running=1, num_scheduled_rows=1, num_waiting=3)  # a place is free: blocks are missing
    assert rig.first_tokens.is_blocked


def test_places_of_a_fair_queue_are_not_known():
    rig = FullRig(quantum=100)
    rig.fill(num_waiting=3)
    assert rig.first_tokens.is_blocked


def test_requests_of_other_processes_wait_for_places_too():
    rig = FullRig()
    rig.fill(num_waiting=10)
    assert rig.predict().wait_s == pytest.approx(30.0 + 10 * 100 / 2, rel=0.2)


def test_what_first_tokens_take_beyond_the_steps_is_learned():
    rig = Rig()
    for _ in range(400):
        request = PendingRequest(1, "", None, prediction=(found := rig.predict()))
        rig.first_tokens.note_first(request, found.ttft_s - rig.first_tokens.overhead_s + 0.03)
        rig.report()
    assert rig.first_tokens.overhead_s == pytest.approx(0.03, abs=0.002)
    for _ in range(400):
        request = PendingRequest(1, "", None, prediction=rig.predict())
        rig.first_tokens.note_first(request, 0.0)  # faster than its steps: nothing is subtracted from these
        rig.report()
    assert rig.first_tokens.overhead_s == 0.0


def test_many_late_first_tokens_of_one_step_count_once():
    rig = Rig()
    for _ in range(2):
        for _ in range(100):
            rig.first_tokens.note_first(PendingRequest(1, "", None, prediction=rig.predict()), 60.0)
        rig.report()
    assert 0 < rig.first_tokens.overhead_s <= 0.002


def test_the_least_loaded_of_several_engine_cores_is_taken():
    rig = Rig()
    rig.report(num_running=5, num_running_prefill_tokens=1000, engine=0)
    busy = rig.predict().wait_s
    rig.step = 0
    for number in range(40):
        rig.report(num_prompt_tokens=50 * (number % 3), engine=1)
    assert rig.predict().wait_s < busy


@pytest.mark.parametrize("disk", [DiskCacheStats(), None])
def test_what_prompts_find_on_disk_is_known_after_a_crash_of_the_engine_core(disk: Any):
    rig = Rig()
    for number in range(1, 21):
        rig.report(prefix_cache_queries=1000 * number, prefix_cache_hits=900 * number, disk=disk)
    rig.step = 0
    for number in range(40):
        rig.report(num_prompt_tokens=50 * (number % 3), disk=disk)
    rig.submit(1000)
    assert rig.predict().wait_s == pytest.approx(2.0 if disk else 20.0, rel=0.1)


def test_the_first_prompts_after_a_crash_tell_what_is_on_disk():
    rig = Rig()
    for number in range(1, 21):  # sessions that are computed for the first time
        rig.report(prefix_cache_queries=1000 * number, disk=DiskCacheStats())
    rig.step = 0
    rig.report(disk=DiskCacheStats())
    rig.report(disk=DiskCacheStats(), prefix_cache_queries=1000, prefix_cache_hits=900)
    rig.submit(1000)
    assert rig.predict().wait_s == pytest.approx(2.0, rel=0.1)
