"""The lines that `--trace` prints about HTTP; those of the engine come from the packages below."""

from __future__ import annotations

from llmstack_llm.trace import trace_line
from llmstack_server.telemetry.middleware import RequestObserver
from llmstack_server.telemetry.request_trace import PromptTrace, RequestTrace


class LineObserver(RequestObserver):
    """One line per stage of each HTTP request, but for those that only look: probes come every second."""

    def on_request(self, trace: RequestTrace) -> None:
        """The head of a request has come."""
        _say(trace, f"{trace.method} {trace.path}")

    def on_prompt(self, trace: RequestTrace, prompt: PromptTrace) -> None:
        """A prompt is handed to the engine; the two ids stand side by side."""
        _say(trace, f"{prompt.request_id} of {prompt.num_prompt_tokens} tokens", "serving")

    def on_sent(self, trace: RequestTrace, num_bytes: int) -> None:
        """A piece of the answer was handed to the connection."""
        _say(trace, f"sent {num_bytes} bytes")

    def on_end(self, trace: RequestTrace, end_s: float) -> None:
        """The answer is complete, or will never be."""
        _say(trace, f"{trace.error or trace.status} after {1000 * (end_s - trace.start_s):.1f} ms")


def _say(trace: RequestTrace, message: str, module: str = "http") -> None:
    if trace.method not in ("GET", "HEAD", "OPTIONS"):
        trace_line(module, f"{trace.http_request_id}: {message}")
