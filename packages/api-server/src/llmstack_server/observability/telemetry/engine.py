"""Observer of the engine's requests, for spans and trace lines."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmstack_llm import RequestObserver, RequestOutput, SubmittedRequest
from llmstack_server.observability.telemetry.request_trace import PromptTrace, RequestTrace, current_trace
from llmstack_types import SamplingParams

OnPrompt = Callable[[RequestTrace, PromptTrace], None]


class PromptObserver(RequestObserver):
    """Notes the prompts of each HTTP request; requests outside of a `RequestTrace` are not noted."""

    def __init__(self, on_prompt: OnPrompt = lambda _, __: None) -> None:
        """`on_prompt` is called for each prompt that is submitted."""
        self._on_prompt = on_prompt
        self._id_to_prompt: dict[str, PromptTrace] = {}

    def on_submitted(self, request: SubmittedRequest) -> None:
        """Begins a prompt of the current HTTP request."""
        trace = current_trace.get()
        if trace is None:
            return
        params = request.params if isinstance(request.params, SamplingParams) else None
        prompt = PromptTrace(request.request_id, len(request.prompt_token_ids), time.monotonic(), params)
        self._id_to_prompt[request.request_id] = prompt
        self._on_prompt(trace, trace.begin_prompt(prompt))

    def on_output(self, output: RequestOutput) -> None:
        """Notes the times and the ends of completions."""
        prompt = self._id_to_prompt.get(output.request_id)
        if prompt is not None:
            prompt.timings = output.metrics
            prompt.finish_reasons += [new.finish_reason for new in output.outputs if new.finish_reason is not None]

    def on_finished(self, request_id: str, error: Exception | None) -> None:
        prompt = self._id_to_prompt.pop(request_id, None)
        if prompt is not None:
            prompt.end_s = time.monotonic()
