"""The front end's lines of a trace: `[TRACE] (module) message`, as requests pass through it.

Loaded only where a trace was asked for. Lines hold ids and counts, never what users wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmstack_engine_core.trace import trace_line
from llmstack_llm.admit import AdmittedRequest
from llmstack_llm.input_processor import InputProcessor, PromptInput
from llmstack_llm.output_processor import OutputProcessor, ProcessedOutputs
from llmstack_types import EngineCoreOutput, EngineCoreRequest, SamplingParams

__all__ = ["TracedInputProcessor", "TracedOutputProcessor", "trace_line"]


class TracedInputProcessor(InputProcessor):
    """Says what was tokenized and what goes to the engine core."""

    def admit(self, prompt: PromptInput, sampling_params: SamplingParams, **options: Any) -> AdmittedRequest:
        """As its base, with a line after it."""
        admitted = super().admit(prompt, sampling_params, **options)
        num_tokens, max_tokens = len(admitted.prompt_token_ids), admitted.sampling_params.max_tokens
        trace_line("input_processor", f"admitted a prompt of {num_tokens} tokens, {max_tokens} more at most")
        return admitted

    def process_inputs(self, request_id: str, admitted: AdmittedRequest, **options: Any) -> list[EngineCoreRequest]:
        """As its base, with a line after it."""
        requests = super().process_inputs(request_id, admitted, **options)
        trace_line("input_processor", f"{request_id}: {len(requests)} completions to the engine core")
        return requests


class TracedOutputProcessor(OutputProcessor):
    """Says what came back, and what it led to."""

    def process_outputs(self, outputs: Iterable[EngineCoreOutput], *details: Any) -> ProcessedOutputs:
        """As its base, with a line before for each output and one after for each request that ends."""
        rows = list(outputs)
        for output in rows:
            trace_line("output_processor", f"{output.request_id}: {len(output.new_token_ids)} tokens to detokenize")
        before = set(self.request_id_to_state)
        processed = super().process_outputs(rows, *details)
        for request_id in processed.request_ids:
            if request_id in before and request_id not in self.request_id_to_state:
                trace_line("output_processor", f"{request_id}: all completions have ended")
        return processed

    def abort_requests(self, request_ids: Iterable[str], *, is_silent: bool = False) -> list[str]:
        """As its base, with a line for each request that is in flight."""
        ids: Sequence[str] = list(request_ids)
        for request_id in ids:
            if request_id in self.request_id_to_state or request_id in self.pooling:
                trace_line("output_processor", f"{request_id}: aborted")
        return super().abort_requests(ids, is_silent=is_silent)
