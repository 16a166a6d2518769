"""Lines that `--trace` prints about HTTP requests."""

from __future__ import annotations

from llmstack_llm.trace import trace_line
from llmstack_server.observability.telemetry.middleware import HttpObserver
from llmstack_server.observability.telemetry.request_trace import PromptTrace, RequestTrace


class LineObserver(HttpObserver):
    """Prints a line per stage of each HTTP request, except for those that read the state of the server."""

    def on_request(self, trace: RequestTrace) -> None:
        _say(trace, f"{trace.method} {trace.path}")

    def on_prompt(self, trace: RequestTrace, prompt: PromptTrace) -> None:
        """Prints the ids of the HTTP request and of the prompt in the engine side by side."""
        _say(trace, f"{prompt.request_id} of {prompt.num_prompt_tokens} tokens", "serving")

    def on_sent(self, trace: RequestTrace, num_bytes: int) -> None:
        _say(trace, f"sent {num_bytes} bytes")

    def on_end(self, trace: RequestTrace, end_s: float) -> None:
        _say(trace, f"{trace.error or trace.status} after {1000 * (end_s - trace.start_s):.1f} ms")


def _say(trace: RequestTrace, message: str, module: str = "http") -> None:
    if trace.method not in ("GET", "HEAD", "OPTIONS"):
        trace_line(module, f"{trace.http_request_id}: {message}")
