"""The flags about what a server tells of itself, and the timings in its answers."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from llmstack_llm.outputs import RequestMetrics
from llmstack_server.environment import Environment
from llmstack_server.errors import ServeError
from llmstack_server.flags import add_serve_arguments
from llmstack_server.observability import ObservabilityConfig, observability_config
from llmstack_server.openai.timings import timings_object

ENDPOINT = ("--otlp-traces-endpoint", "http://localhost:4318/v1/traces")


def parse(*arguments: str, **environment: Any) -> ObservabilityConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return observability_config(parser.parse_args(arguments), Environment(**environment))


def test_nothing_is_told_unless_asked() -> None:
    config = parse()
    assert config == ObservabilityConfig()
    assert not config.follows_requests


def test_flags_are_taken_over() -> None:
    config = parse(*ENDPOINT, "--collect-detailed-traces", "model", "--trace", "--enable-per-request-metrics")
    assert config == ObservabilityConfig(ENDPOINT[1], True, True, True)
    assert parse("--stuck-request-timeout", "0").stuck_timeout_s == 0


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)])
def test_the_environment_asks_for_trace_lines(value: str | None, is_on: bool) -> None:
    assert parse(trace=value).has_trace_lines is is_on


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--collect-detailed-traces", "all"), "--otlp-traces-endpoint"),
        ((*ENDPOINT, "--disable-log-stats"), "--disable-log-stats"),
        (("--enable-per-request-metrics", "--disable-log-stats"), "--disable-log-stats"),
        (("--kv-cache-metrics", "--disable-log-stats"), "--disable-log-stats"),
    ],
)
def test_what_cannot_work_together_is_refused(arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(ServeError, match=named) as caught:
        parse(*arguments)
    assert caught.value.exit_code == 2


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
