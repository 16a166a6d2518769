"""Trace lines of the front end, `[TRACE] (module) message`.

Loaded only where a trace was asked for. Lines hold ids and counts, never texts of users.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_engine_core.trace import trace_line
from llmstack_llm.outputs.observers import RequestObserver, SubmittedRequest
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_types import EngineCoreOutput, SamplingParams

_WHOLE = "all completions have ended"

__all__ = ["TraceObserver", "trace_line"]


class TraceObserver(RequestObserver):
    """Prints what was tokenized and submitted, what the engine core returned, and which requests ended."""

    def __init__(self) -> None:
        self._id_to_end: dict[str, str] = {}

    def on_submitted(self, request: SubmittedRequest) -> None:
        """Two lines: the prompt, and the completions of it."""
        if isinstance(request.params, SamplingParams):
            self._id_to_end[request.request_id] = "aborted"
            num_tokens, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
            trace_line("input_processor", f"admitted a prompt of {num_tokens} tokens, {max_tokens} more at most")
            trace_line(
                "input_processor", f"{request.request_id}: {request.num_completions} completions to the engine core"
            )

    def on_engine_outputs(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """A line for each output."""
        for output in outputs:
            trace_line("output_processor", f"{output.request_id}: {len(output.new_token_ids)} tokens to detokenize")

    def on_output(self, output: RequestOutput) -> None:
        """Notes that a request has ended by itself."""
        if output.finished and any(completion.finish_reason != "abort" for completion in output.outputs):
            self._id_to_end[output.request_id] = _WHOLE

    def on_finished(self, request_id: str, error: Exception | None) -> None:
        """The last line of a request."""
        end = self._id_to_end.pop(request_id, None)
        if end is not None:
            trace_line("output_processor", f"{request_id}: {end if error is None else _WHOLE}")
