"""The flags and the configuration of what a server tells about itself beside its metrics."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from llmstack_server.environment import Environment
from llmstack_server.errors import ServeError
from llmstack_server.flag_types import seconds, share

DETAILS = ("model", "worker", "all")
_OFF = ("", "0", "false")


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    """What is told to whom.

    Attributes:
        otlp_traces_endpoint: Collector of OpenTelemetry spans; None makes none.
        has_detailed_traces: Spans say how much time the scheduler and the model took.
        has_trace_lines: Each stage of each request prints a line to standard error.
        has_request_metrics: Answers to single prompts carry their timings.
        stuck_timeout_s: A running request without progress for so long is reported; 0 reports none.
    """

    otlp_traces_endpoint: str | None = None
    has_detailed_traces: bool = False
    has_trace_lines: bool = False
    has_request_metrics: bool = False
    stuck_timeout_s: float = 300.0

    @property
    def follows_requests(self) -> bool:
        """Whether anything has to be done for each request."""
        return self.has_trace_lines or self.otlp_traces_endpoint is not None


def add_observability_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of this module."""
    add = parser.add_argument_group("observability").add_argument
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span per stage of each request to this OpenTelemetry collector (needs llmstack-server[otel])",
    )
    add(
        "--collect-detailed-traces",
        nargs="+",
        choices=DETAILS,
        default=[],
        metavar="{model,worker,all}",
        help="spans also say how much time the scheduler and the model took",
    )
    add("--trace", action="store_true", help="print one line per stage of each request, in the order it happens")
    add("--enable-per-request-metrics", action="store_true", help="answers to single prompts carry their timings")
    add("--kv-cache-metrics", action="store_true", help="measure how long KV blocks keep what they hold")
    add(
        "--kv-cache-metrics-sample",
        type=share,
        default=0.01,
        metavar="X",
        help="share of the blocks that is measured then (default: 0.01)",
    )
    add(
        "--stuck-request-timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="report running requests without progress for so long, 0 for never (default: 300)",
    )


def observability_config(namespace: argparse.Namespace, environment: Environment) -> ObservabilityConfig:
    """The configuration of a parsed command line.

    Raises:
        ServeError: A combination that cannot work; the text names the flags.
    """
    if namespace.collect_detailed_traces and namespace.otlp_traces_endpoint is None:
        raise ServeError("--collect-detailed-traces needs --otlp-traces-endpoint", exit_code=2)
    if namespace.disable_log_stats:
        for flag in ("otlp_traces_endpoint", "enable_per_request_metrics", "kv_cache_metrics"):
            if getattr(namespace, flag):
                name = "--" + flag.replace("_", "-")
                raise ServeError(f"{name} is part of the statistics that --disable-log-stats turns off", exit_code=2)
    return ObservabilityConfig(
        otlp_traces_endpoint=namespace.otlp_traces_endpoint,
        has_detailed_traces=bool(namespace.collect_detailed_traces),
        has_trace_lines=namespace.trace or (environment.trace or "").lower() not in _OFF,
        has_request_metrics=namespace.enable_per_request_metrics,
        stuck_timeout_s=namespace.stuck_request_timeout,
    )
