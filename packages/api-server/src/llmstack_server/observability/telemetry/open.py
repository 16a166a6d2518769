"""The observers of requests that a configuration enables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmstack_llm import RequestObserver
from llmstack_server.observability.telemetry.engine import OnPrompt, PromptObserver
from llmstack_server.observability.telemetry.middleware import HttpObserver
from llmstack_server.observability.telemetry.request_trace import PromptTrace, RequestTrace
from llmstack_server.options.observability import ObservabilityConfig


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Observers of the requests of one server.

    Attributes:
        observers: Receive the stages of each HTTP request.
        close: Sends the remaining spans; may block for long.
    """

    observers: tuple[HttpObserver, ...]
    on_prompt: OnPrompt
    close: Callable[[], None]

    def engine_observer(self) -> RequestObserver:
        """A new observer of the engine's requests."""
        return PromptObserver(self.on_prompt)


def open_telemetry(config: ObservabilityConfig, model_name: str) -> Telemetry | None:
    """The observers of a configuration; None where it enables none.

    Raises:
        ServeError: A package is needed that is not installed.
    """
    if not config.follows_requests:
        return None
    observers: list[HttpObserver] = []
    on_prompt: OnPrompt = _ignore
    close: Callable[[], None] = lambda: None  # noqa: E731 (a named default)
    if config.has_trace_lines:
        from llmstack_server.observability.telemetry.lines import LineObserver

        lines = LineObserver()
        observers.append(lines)
        on_prompt = lines.on_prompt
    if config.otlp_traces_endpoint is not None:
        from llmstack_server.observability.telemetry.otlp import SpanSender

        sender = SpanSender(config, model_name)
        observers.append(sender.observer)
        close = sender.close
    return Telemetry(tuple(observers), on_prompt, close)


def _ignore(trace: RequestTrace, prompt: PromptTrace) -> None:
    pass
