"""Options of traces, timings and the watchdog."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from llmstack_llm.options.option import OptionGroup
from llmstack_llm.options.problem import Problem
from llmstack_types.options import option, option_group


@option_group
class ObservabilityConfig(OptionGroup):
    """Options of spans, timings and explanations.

    Attributes:
        has_trace_lines: Each stage of each request prints a line; `--trace` of the engine.
    """

    title = "Observability"

    otlp_traces_endpoint: str | None = option(
        None,
        metavar="URL",
        help="send a span for each stage of each request to this OpenTelemetry collector (needs llmstack-server[otel])",
    )
    detailed_traces: tuple[Literal["model", "worker", "all"], ...] = option(
        (),
        flag="--collect-detailed-traces",
        metavar="{model,worker,all}",
        help="add the time of the scheduler and of the model to spans",
    )
    has_request_metrics: bool = option(
        False, flag="--enable-per-request-metrics", help="add timings to the answers of requests with one prompt"
    )
    stuck_timeout_s: float = option(
        300.0,
        flag="--stuck-request-timeout",
        at_least=0,
        metavar="S",
        help="report requests that run for this many seconds without progress; 0 reports none",
    )
    explains_text: bool = option(
        False,
        flag="--explain-text",
        help="keep the tokens of the last prompts, and show in the explanation of a request where its text differs "
        "from other prompts of its own API key",
    )
    has_trace_lines: bool = False

    @property
    def has_detailed_traces(self) -> bool:
        """Whether spans carry the time of the scheduler and of the model."""
        return bool(self.detailed_traces)

    @property
    def follows_requests(self) -> bool:
        """Whether anything has to be done for each request."""
        return self.has_trace_lines or self.otlp_traces_endpoint is not None

    def conflicts(self) -> Iterator[Problem]:
        """Adds details of spans without a collector."""
        yield from super().conflicts()
        if self.detailed_traces and self.otlp_traces_endpoint is None:
            yield Problem("{detailed_traces} needs {otlp_traces_endpoint}")
