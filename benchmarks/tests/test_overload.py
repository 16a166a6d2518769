"""A real server at ten times its capacity: what was accepted completes, and what was not says when to retry."""

from __future__ import annotations

from math import inf

import overload
import pytest
from overload import Answer, bounds, quantiles, rate_of


def test_goodput_counts_whole_answers_whose_first_token_is_in_time_and_in_the_window():
    def answer(first_s: float | None, *, is_complete: bool = True) -> Answer:
        return Answer(10.0, 20, 200, first_s, 15.0, 20, is_complete)

    in_time, late, early, cut = answer(11.0), answer(14.0), answer(10.5), answer(11.0, is_complete=False)
    assert rate_of([in_time, in_time, late, early, cut, answer(None)], 11.0, 15.0, 2.0) == 0.5


def test_quantiles_are_values_that_occurred():
    assert quantiles(range(1, 101)) == {"p50": 51, "p99": 100, "max": 100}
    assert quantiles([]) == {}


def test_quantiles_of_a_histogram_are_the_upper_bounds_of_what_came_in_between():
    before, after = {0.1: 5.0, 1.0: 6.0, inf: 6.0}, {0.1: 10.0, 1.0: 106.0, inf: 107.0}
    assert bounds(before, after) == {"p50": 1000.0, "p99": 1000.0}
    assert bounds(before, before) == {}
    assert bounds({}, {0.1: 99.0, inf: 200.0})["p99"] == inf


@pytest.mark.full
def test_what_is_accepted_completes_and_what_is_refused_says_when_to_retry():
    arguments = ["--seconds", "8", "--peak-seconds", "6", "--times", "6", "--max-queue-wait", "1.5"]
    with overload.server(16, 25.0, ["--max-queue-wait", "1.5"]) as (pid, port):
        report = overload.run(pid, port, arguments)
    assert report.num_refused > 0
    assert report.num_accepted > 0
    assert (report.num_incomplete, report.num_other) == (0, 0)
    assert 1.0 < report.retry_after_s["p50"] < 60.0
    assert report.goodput_per_s > 0
    assert report.grown_mib < 64
    for times in (report.refusal_ms, report.server_refusal_ms, report.server_ttft_ms, report.client_lag_ms):
        assert 0 <= times["p50"] <= times["p99"]
