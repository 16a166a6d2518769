"""Flags about observability."""

from __future__ import annotations

import argparse

import pytest

from llmstack_server.options.command_line import add_serve_arguments, settings_from
from llmstack_server.options.config import config_from
from llmstack_server.options.errors import ServeError
from llmstack_server.options.observability import ObservabilityConfig

ENDPOINT = ("--otlp-traces-endpoint", "http://localhost:4318/v1/traces")


def parse(*arguments: str, **environment: str) -> ObservabilityConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from(settings_from(parser.parse_args(arguments), environment)).observability


def test_nothing_is_observed_by_default() -> None:
    config = parse()
    assert config == ObservabilityConfig()
    assert not config.follows_requests


def test_flags_become_fields_of_the_configuration() -> None:
    config = parse(*ENDPOINT, "--collect-detailed-traces", "model", "--trace", "--enable-per-request-metrics")
    assert config == ObservabilityConfig(
        otlp_traces_endpoint=ENDPOINT[1], detailed_traces=("model",), has_trace_lines=True, has_request_metrics=True
    )
    assert config.has_detailed_traces
    assert parse("--stuck-request-timeout", "0").stuck_timeout_s == 0


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_environment_asks_for_trace_lines(value: str, is_on: bool) -> None:
    assert parse(LLMSTACK_TRACE=value).has_trace_lines is is_on


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
