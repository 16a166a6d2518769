"""Predicted first tokens: known queues in steps of a known duration."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_client.prediction import (
    EngineLoad,
    EnginePredictor,
    QueuedTokens,
    StepCosts,
    StepLimits,
    first_token,
)
from llmstack_engine_client.prediction.cost_model import LinearCostModel, StepWork
from llmstack_engine_client.prediction.first_token import Arrivals
from llmstack_engine_client.prediction.step_costs import MIN_NUM_STEPS, Speed
from llmstack_types import SchedulerStats

# A step of 100 tokens; each takes a second, and 10 ms per prompt token.
LIMITS = StepLimits(max_num_rows=4, max_num_tokens=100)
MODEL = LinearCostModel(1.0, 0.01, 0.0, 0.0)
IDLE, NOTHING = EngineLoad(), QueuedTokens()


def predict(load=IDLE, before=NOTHING, num_tokens=50, now_s=0.0, **options):
    return first_token(load, LIMITS, MODEL, before, num_tokens, now_s, **options)


def test_alone_a_prompt_takes_its_own_steps():
    assert predict(num_tokens=50) == pytest.approx((0.0, 1.5))
    assert predict(num_tokens=250) == pytest.approx((0.0, 2.0 + 2.0 + 1.5))


def test_a_step_under_way_ends_first():
    load = EngineLoad(end_s=10.0, num_running=1)  # a decode, until 11.0
    assert predict(load, now_s=10.25, num_tokens=50) == pytest.approx((0.75, 0.75 + 1.5))


def test_a_step_that_takes_longer_than_predicted_may_end_now():
    assert predict(EngineLoad(end_s=10.0, num_running=1), now_s=20.0) == pytest.approx((0.0, 1.5))


def test_the_prompts_before_it_are_computed_first():
    # 150 tokens of a running prompt and 130 waiting ones: 99 now, 181 later; a decode takes the 100th place.
    load = EngineLoad(end_s=0.0, num_running=1, num_prefill_tokens=150, num_waiting=1, num_waiting_tokens=130)
    wait_s, ttft_s = predict(load, QueuedTokens(num_waiting=130, num_requests=1), num_tokens=10)
    assert wait_s == pytest.approx(1.99 + 1.99)
    assert ttft_s == pytest.approx(wait_s + 1.0 + 0.01 * (181 - 99 + 10))


def test_what_came_since_the_last_step_is_no_part_of_the_step_under_way():
    load = EngineLoad(end_s=0.0, num_running=1)
    alone = predict(load, num_tokens=10)
    behind = predict(load, QueuedTokens(num_coming=300, num_requests=1), num_tokens=10)
    assert alone == pytest.approx((1.0, 2.1))
    assert behind.wait_s == pytest.approx(1.0 + 3 * 1.99)


def test_the_first_request_of_an_idle_engine_core_begins_a_step():
    before = QueuedTokens(num_coming=80, num_requests=1, coming_s=5.0)
    assert predict(before=before, num_tokens=10, now_s=5.3) == pytest.approx((1.5, 1.5 + 1.1))


def test_one_request_may_take_a_part_of_each_step_only():
    limits = LIMITS._replace(max_num_row_tokens=20)
    assert first_token(EngineLoad(), limits, MODEL, NOTHING, 50, 0.0).ttft_s == pytest.approx(2.0 + 2.0 + 1.1)


@pytest.mark.parametrize(("base_s", "num_steps"), [(0.01, 5), (0.1, 4), (0.125, 3), (0.4, 2)])
def test_beside_a_stream_a_prompt_takes_the_steps_that_its_pace_cuts(base_s, num_steps):
    # The time of prompts: two steps of the stream, six times the base, the same, and the limit of four further steps.
    model = LinearCostModel(base_s, 0.01, max(0.2 - base_s, 0.0), 0.0)
    limits = StepLimits(max_num_rows=4, max_num_tokens=1000, max_itl_steps=5.0)
    found = first_token(EngineLoad(end_s=0.0, num_running=1), limits, model, NOTHING, 190, 0.0)
    assert found.ttft_s - found.wait_s == pytest.approx(1.9 + num_steps * model.step_s(StepWork(0, 1, 0)))


def test_prompts_that_do_not_share_a_step_take_one_after_the_other():
    limits = StepLimits(max_num_rows=9, max_num_tokens=100, max_prefill_tokens=20)
    together = QueuedTokens(num_waiting=10, num_requests=1)
    behind = QueuedTokens(num_coming=45, num_requests=3, coming_s=0.0)  # 20 and 20 tokens, and one of 5 beside it
    load = EngineLoad(end_s=0.0, num_waiting=1, num_waiting_tokens=10)
    assert first_token(EngineLoad(), limits, MODEL, NOTHING, 50, 0.0).ttft_s == pytest.approx(1.5)
    assert first_token(load, limits, MODEL, together, 10, 0.0).ttft_s == pytest.approx(1.1 + 1.1)
    assert first_token(IDLE, limits, MODEL, behind, 10, 0.0).ttft_s == pytest.approx(1.2 + 1.2 + 1.15)
    assert first_token(IDLE, limits, MODEL, behind, 50, 0.0).ttft_s == pytest.approx(1.2 + 1.2 + 1.05 + 1.5)


def test_where_all_places_are_taken_one_has_to_become_free():
    load = EngineLoad(end_s=0.0, num_running=4)
    assert predict(load, departures_per_s=0.1).wait_s == pytest.approx(10.0)
    behind = QueuedTokens(num_waiting=10, num_requests=2)
    assert predict(load, behind, departures_per_s=0.1).wait_s == pytest.approx(30.0)
    assert predict(load._replace(num_running=3), departures_per_s=0.1).wait_s == pytest.approx(1.0)


def test_later_requests_fill_the_last_step_and_no_more():
    assert predict(num_tokens=150, arrivals=Arrivals(1000.0)).ttft_s == pytest.approx(2.0 + 2.0)
    assert predict(num_tokens=150, arrivals=Arrivals(5.0)).ttft_s == pytest.approx(2.0 + 1.6)
    spread = Arrivals(5.0, 450.0)  # half of its deviation in two seconds is 15 tokens
    assert predict(num_tokens=150, arrivals=spread).ttft_s == pytest.approx(2.0 + 1.75)


def test_later_requests_add_a_quarter_at_most():
    one_step = predict(EngineLoad(0.0, num_running=1), num_tokens=1)
    assert one_step == pytest.approx((1.0, 2.01))
    flooded = predict(EngineLoad(0.0, num_running=1), num_tokens=1, arrivals=Arrivals(1000.0))
    assert flooded == pytest.approx((1.0, 1.25 * 2.01))


def test_a_request_of_an_idle_engine_core_waits_for_no_later_one():
    assert predict(num_tokens=50, arrivals=Arrivals(1000.0, 1e6)) == pytest.approx((0.0, 1.5))


@given(
    load=st.builds(EngineLoad, st.just(0.0), *[st.integers(0, 500)] * 2, st.just(3), *[st.integers(0, 500)] * 2),
    num_before=st.integers(0, 1000),
    num_more=st.integers(0, 1000),
    num_tokens=st.integers(1, 1000),
    now_s=st.floats(0, 10),
)
def test_more_tokens_before_a_request_never_make_it_earlier(load, num_before, num_more, num_tokens, now_s):
    fewer = predict(load, QueuedTokens(num_waiting=num_before), num_tokens, now_s)
    more = predict(load, QueuedTokens(num_waiting=num_before + num_more), num_tokens, now_s)
    assert more.ttft_s >= fewer.ttft_s - 1e-9
    assert fewer.ttft_s >= fewer.wait_s >= 0


def test_step_costs_are_known_after_enough_steps_with_prompts():
    costs, model = StepCosts(), LinearCostModel(0.01, 2e-5, 1e-4, 1e-7)
    for number in range(200):
        work = StepWork(number % 7 * 100, 1 + number % 5, 1000 + number * 37 % 900)
        assert (costs.model() is None) == (number < MIN_NUM_STEPS)
        costs.observe(work, model.step_s(work))
    fitted = costs.model()
    assert fitted is not None
    for work in (StepWork(0, 3, 1200), StepWork(2000, 1, 5000)):
        assert fitted.step_s(work) == pytest.approx(model.step_s(work), rel=0.01)


def test_decodes_alone_say_nothing_about_prompts():
    costs = StepCosts()
    for number in range(100):
        costs.observe(StepWork(0, 1 + number % 3, 100), 0.01)
    assert costs.model() is None


def test_step_costs_follow_a_machine_that_becomes_slower():
    costs, work = StepCosts(), StepWork(100, 1, 0)
    for seconds in [0.1] * 500 + [0.3] * 3000:
        costs.observe(work, seconds)
    model = costs.model()
    assert model is not None
    assert model.step_s(work) == pytest.approx(0.3, rel=0.2)


def test_what_cannot_be_a_step_is_not_learned():
    costs = StepCosts()
    for _ in range(50):
        costs.observe(StepWork(10, 1, 0), 0.0)
        costs.observe(StepWork(10, 1, 0), float("nan"))
        costs.observe(StepWork(0, 0, 0), 1.0)
    assert costs.model() is None


def reported(predictor: EnginePredictor, num_steps: int = 40, begin_s: float = 0.0, step: int = 0) -> float:
    """Reports of steps that take 1 s, and 10 ms per prompt token; when the last one ended."""
    end_s = begin_s
    for number in range(num_steps):
        num_prompt_tokens = 50 * (number % 3)
        end_s += MODEL.step_s(StepWork(num_prompt_tokens, 1, 0))
        stats = SchedulerStats(
            step=step + number + 1, num_running=1, num_scheduled_tokens=num_prompt_tokens + 1, num_scheduled_rows=1,
            prefix_cache_queries=100 * number, prefix_cache_hits=25 * number, num_waiting_prefill_tokens=100,
        )  # fmt: skip
        predictor.observe(stats, end_s, None)
    return end_s


def test_a_predictor_is_calibrated_by_reports_alone():
    predictor = EnginePredictor(LIMITS)
    assert predictor.predict(NOTHING, 50, 0.0) is None
    end_s = reported(predictor)
    prediction = predictor.predict(NOTHING, 50, end_s)
    assert prediction == pytest.approx((1.0, 2.5), rel=0.02)
    assert predictor.found_share == pytest.approx(0.25)
    assert predictor.load.num_waiting_tokens == 75


def test_a_machine_that_becomes_slower_is_noticed_within_seconds():
    speed = Speed()
    assert speed.scaled(MODEL) == MODEL
    for number in range(1000):
        work = StepWork(50 * (number % 3), 1, 0)
        speed.observe(work, MODEL.step_s(work), MODEL)
    assert astuple(speed.scaled(MODEL)) == pytest.approx(astuple(MODEL))
    for number in range(15):
        work = StepWork(50 * (number % 3), 1, 0)
        speed.observe(work, 2 * MODEL.step_s(work), MODEL)
    assert astuple(speed.scaled(MODEL)) == pytest.approx([2 * weight for weight in astuple(MODEL)], rel=0.05)


def test_a_pause_within_a_step_is_soon_forgotten():
    speed, work = Speed(), StepWork(0, 1, 0)
    speed.observe(work, 10_000.0, MODEL)
    for _ in range(30):
        speed.observe(work, 1.0, MODEL)
    assert speed.scaled(MODEL).base_s == pytest.approx(1.0, rel=0.05)


def test_drafted_tokens_are_no_prompt():
    """Each draft takes what a decode takes, of which a prompt's token takes the tenth part."""
    predictor, model, end_s, num_drafts = EnginePredictor(LIMITS), LinearCostModel(1.0, 0.01, 0.1, 0.0), 0.0, 0
    for number in range(60):
        num_prompt_tokens, num_new_drafts = 50 * (number % 3), 1 + number % 4
        num_drafts += num_new_drafts
        end_s += model.step_s(StepWork(num_prompt_tokens, 1 + num_new_drafts, 0))
        stats = SchedulerStats(
            step=number + 1, num_running=1, num_scheduled_rows=1, num_draft_tokens=num_drafts,
            num_scheduled_tokens=num_prompt_tokens + 1 + num_new_drafts,
        )  # fmt: skip
        predictor.observe(stats, end_s, None)
    assert predictor.predict(NOTHING, 80, end_s) == pytest.approx((1.1, 1.1 + 1.9), rel=0.02)


def test_a_pause_is_no_step():
    """Nothing was to be done, so the time between two reports is no duration."""
    predictor = EnginePredictor(LIMITS)
    end_s = reported(predictor)
    idle = SchedulerStats(step=41, num_scheduled_tokens=1, num_scheduled_rows=1)
    predictor.observe(idle, end_s + 1.0, 1.0)
    predictor.observe(idle._replace(step=42), end_s + 1000.0, 1.0)
    prediction = predictor.predict(NOTHING, 50, end_s + 2000.0)
    assert prediction is not None
    assert prediction.ttft_s == pytest.approx(1.5, rel=0.05)


def test_another_engine_core_begins_its_counters_again():
    predictor = EnginePredictor(LIMITS)
    end_s = reported(predictor)
    last_s = reported(predictor, begin_s=end_s + 500.0)
    assert predictor.predict(NOTHING, 50, last_s) == pytest.approx((1.0, 2.5), rel=0.05)


def test_reports_of_the_same_moment_are_no_steps():
    """The clock of another machine may make two reports come at once."""
    predictor = EnginePredictor(LIMITS)
    for number in range(40):
        stats = SchedulerStats(step=number + 1, num_running=1, num_scheduled_tokens=51, num_scheduled_rows=1)
        predictor.observe(stats, 5.0, None)
    assert predictor.predict(NOTHING, 50, 5.0) is None
    last_s = reported(predictor, begin_s=5.0, step=40)
    assert predictor.predict(NOTHING, 50, last_s) == pytest.approx((1.0, 2.5), rel=0.05)


def test_a_long_prompt_that_lets_shorter_ones_go_first_holds_them_for_a_step():
    limits = LIMITS._replace(shorter_prompts_first=True)
    long = EngineLoad(end_s=0.0, num_running=1, num_prefill_tokens=5000)
    few = long._replace(num_prefill_tokens=150)

    def ttft_s(limits, load, num_tokens):
        return first_token(load, limits, MODEL, NOTHING, num_tokens, 0.0).ttft_s

    assert ttft_s(LIMITS, long, 50) > 90
    assert ttft_s(limits, long, 50) < 5
    assert ttft_s(limits, long, 3000) == ttft_s(LIMITS, long, 3000)
    assert ttft_s(limits, few, 50) == ttft_s(LIMITS, few, 50)
