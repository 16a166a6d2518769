"""Places that become free: known lengths of answers, answers that may stop at any token, and prompts before them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_client.prediction import EngineLoad, EnginePredictor, Places, QueuedTokens, StepLimits, first_token
from llmstack_engine_client.prediction.cost_model import LinearCostModel
from llmstack_engine_client.prediction.places import AnswerLengths
from llmstack_types import RequestProgress, SchedulerStats

MODEL = LinearCostModel(1.0, 0.01, 0.0, 0.0)
LIMITS = StepLimits(max_num_rows=2, max_num_tokens=100)


def known(num_left: int, num_output_tokens: int = 0, num_prompt_tokens: int = 10) -> RequestProgress:
    return RequestProgress(num_prompt_tokens, num_output_tokens, num_output_tokens + num_left, can_stop=False)


def open_ended(num_left: int = 10_000, num_output_tokens: int = 1) -> RequestProgress:
    return RequestProgress(10, num_output_tokens, num_output_tokens + num_left, can_stop=True)


def places_of(*requests: RequestProgress, max_num_rows: int = 2, **options: float) -> Places:
    places = Places(max_num_rows, **options)
    places.add_all(requests)
    return places


def test_a_free_place_needs_no_wait():
    places = places_of(known(50, 1))
    assert (places.num_steps, places.num_prompt_tokens) == (0, 0)


def test_the_first_answer_to_reach_its_limit_leaves_its_place():
    assert places_of(known(50, 3), known(7, 90)).num_steps == 7


def test_waiting_requests_take_places_before_a_further_one():
    # One has the place from step 7 to 27, the next from 27 on; the other place is taken until 50.
    places = places_of(known(50, 3), known(7, 90), known(20), known(30))
    assert (places.num_steps, places.num_prompt_tokens) == (50, 20)
    places.add(known(5, num_prompt_tokens=400))
    assert (places.num_steps, places.num_prompt_tokens) == (55, 420)


def test_drafts_shorten_the_wait():
    assert places_of(known(50, 3), known(30, 90), tokens_per_step=1.5).num_steps == pytest.approx(20)


def test_the_first_of_many_answers_that_may_stop_ends_early():
    """Each stops within 100 tokens on the mean, so the first of 20 within about 5, and of 2 within 50."""
    many = places_of(*[open_ended()] * 20, max_num_rows=20, stop_rate=0.01)
    few = places_of(*[open_ended()] * 2, stop_rate=0.01)
    assert many.num_steps == pytest.approx(2.5, rel=0.1)
    assert few.num_steps == pytest.approx(29, rel=0.1)


def test_an_answer_that_may_stop_ends_at_its_limit_at_last():
    assert places_of(open_ended(3), open_ended(4), stop_rate=0.001).num_steps == 3


def test_where_nothing_ever_stopped_the_limit_counts():
    assert places_of(open_ended(300), open_ended(400)).num_steps == 300


def test_requests_that_are_not_listed_count_like_the_others():
    requests = [known(10, 5), known(10, 5), *[known(10)] * 8]
    listed, counted = places_of(*requests, *[known(10)] * 100), Places(2)
    counted.add_all(requests, num_uncounted=100)
    assert counted.num_steps == pytest.approx(listed.num_steps, rel=0.1)
    assert counted.num_prompt_tokens == pytest.approx(listed.num_prompt_tokens, rel=0.25)
    nothing_known = Places(2)
    nothing_known.add_all([], num_uncounted=3)
    assert nothing_known.num_steps > 0


def test_requests_that_are_not_listed_and_may_stop_count_with_their_mean():
    waiting = [open_ended(num_output_tokens=0)] * 400
    listed, counted = Places(4, stop_rate=0.01), Places(4, stop_rate=0.01)
    listed.add_all(waiting)
    counted.add_all(waiting[:40], num_uncounted=360)
    assert counted.num_steps == pytest.approx(400 * 100 / 4, rel=0.1)
    assert counted.num_steps == pytest.approx(listed.num_steps, rel=0.1)


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 5))
def test_known_lengths_are_as_in_a_queue_step_by_step(lengths, max_num_rows):
    running: list[int] = []
    waiting, step = [*lengths, 1], 0
    while True:
        running = [left for left in running if left]
        while waiting and len(running) < max_num_rows:
            running.append(waiting.pop(0))
        if not waiting:  # the last one has its place
            break
        running, step = [left - 1 for left in running], step + 1
    assert places_of(*map(known, lengths), max_num_rows=max_num_rows).num_steps == step


def test_how_often_answers_stop_is_learned():
    lengths = AnswerLengths()
    for number in range(300):
        lengths.observe(50, is_stopped=number % 2 == 0)
    assert lengths.stop_rate == pytest.approx(0.01, rel=0.1)
    for _ in range(600):
        lengths.observe(50, is_stopped=False)
    assert lengths.stop_rate < 1e-4


def test_a_first_token_waits_for_the_place_and_not_for_prompts_computed_by_then():
    load = EngineLoad(end_s=10.0, num_running=2, num_waiting=1, num_waiting_tokens=500)
    before = QueuedTokens(num_waiting=500, num_requests=1)
    found = first_token(load, LIMITS, MODEL, before, 50, 10.0, departures_per_s=0.001, free_s=40.0)
    assert found == pytest.approx((30.0, 31.5))
    assert first_token(load, LIMITS, MODEL, before, 50, 60.0, free_s=40.0).wait_s == 0.0


def measured(durations: list[float]) -> tuple[EnginePredictor, float]:
    """An engine core with both places taken, whose steps take so long, and 10 ms more per prompt token."""
    predictor, end_s = EnginePredictor(LIMITS), 0.0
    for number, seconds in enumerate(durations):
        num_prompt_tokens = 50 * (number % 3)
        end_s += seconds + 0.01 * num_prompt_tokens
        stats = SchedulerStats(
            step=number + 1, num_running=2, num_scheduled_rows=2, num_scheduled_tokens=num_prompt_tokens + 2
        )
        predictor.observe(stats, end_s, None)
    return predictor, end_s


def test_a_predictor_knows_when_a_place_is_free():
    predictor, end_s = measured([1.0] * 60)
    requests = [known(40, 3), known(30, 9), known(5, num_prompt_tokens=100)]
    found = predictor.predict(QueuedTokens(num_requests=1), 50, end_s, lambda _: requests, 1)
    assert found is not None
    assert found.wait_s == pytest.approx(35.0 + 1.0, rel=0.02)
    assert found.ttft_s == pytest.approx(found.wait_s + 1.5, rel=0.02)


def test_a_long_wait_is_by_the_mean_of_steps_and_not_by_the_usual_one():
    """Each tenth step takes four times as long, which makes the mean 1.3."""
    predictor, end_s = measured([4.0 if number % 10 == 5 else 1.0 for number in range(2000)])
    found = predictor.predict(QueuedTokens(), 50, end_s, lambda _: [known(900, 3), known(800, 9)])
    assert found is not None
    assert found.wait_s == pytest.approx(800 * 1.3, rel=0.15)
