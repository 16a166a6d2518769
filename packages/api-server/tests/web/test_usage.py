"""Timings in answers."""

from __future__ import annotations

import pytest

from llmstack_llm.outputs.request_output import RequestMetrics
from llmstack_server.web.usage import timings_object


def test_timings_are_those_of_the_request_in_milliseconds() -> None:
    timings = timings_object(RequestMetrics(1.0, 3.0, 6.0, 4, 1.5, 2.0))
    assert timings == {
        "time_to_first_token_ms": 2000.0,
        "generation_time_ms": 3000.0,
        "queue_time_ms": 1000.0,
        "mean_itl_ms": 1000.0,
        "tokens_per_second": 1.0,
    }


@pytest.mark.parametrize("metrics", [None, RequestMetrics(1.0)])
def test_what_is_not_known_is_null(metrics: RequestMetrics | None) -> None:
    timings = timings_object(metrics)
    assert len(timings) == 5
    assert set(timings.values()) == {None}


def test_a_single_token_has_no_interval() -> None:
    timings = timings_object(RequestMetrics(1.0, 3.0, 3.0, 1, 1.5, 2.0))
    assert timings["mean_itl_ms"] is None
    assert timings["tokens_per_second"] == 1.0
