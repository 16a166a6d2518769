"""Puts together what a server was asked to tell about its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmstack_server.observability import ObservabilityConfig
from llmstack_server.protocols import EngineClient
from llmstack_server.telemetry.engine import OnPrompt, observed_engine
from llmstack_server.telemetry.middleware import RequestObserver
from llmstack_server.telemetry.request_trace import PromptTrace, RequestTrace


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What follows the requests of one server.

    Attributes:
        observers: Hear the stages over HTTP.
        close: Sends what is left; may block for long.
    """

    observers: tuple[RequestObserver, ...]
    on_prompt: OnPrompt
    close: Callable[[], None]

    def observed(self, engine: EngineClient) -> EngineClient:
        """`engine`, noting what passes through."""
        return observed_engine(engine, self.on_prompt)


def open_telemetry(config: ObservabilityConfig, model_name: str) -> Telemetry | None:
    """What is asked for; None, and nothing imported, where that is nothing.

    Raises:
        ServeError: It needs a package that is not installed.
    """
    if not config.follows_requests:
        return None
    observers: list[RequestObserver] = []
    on_prompt: OnPrompt = _ignore
    close: Callable[[], None] = lambda: None  # noqa: E731 (a name for what does nothing)
    if config.has_trace_lines:
        from llmstack_server.telemetry.lines import LineObserver

        lines = LineObserver()
        observers.append(lines)
        on_prompt = lines.on_prompt
    if config.otlp_traces_endpoint is not None:
        from llmstack_server.telemetry.otlp import SpanSender

        sender = SpanSender(config, model_name)
        observers.append(sender.observer)
        close = sender.close
    return Telemetry(tuple(observers), on_prompt, close)


def _ignore(trace: RequestTrace, prompt: PromptTrace) -> None:
    pass
