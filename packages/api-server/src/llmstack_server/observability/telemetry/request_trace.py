"""Times and facts of one HTTP request, for spans and trace lines."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from llmstack_llm import RequestMetrics
from llmstack_types import SamplingParams

MAX_PROMPTS = 64
"""The number of prompts of one request that are traced; a request may have a thousand."""


@dataclass(slots=True)
class PromptTrace:
    """One prompt in the engine.

    Attributes:
        sampling_params: None for a prompt of a pooling request.
        timings: The timings of the last output; None before the first.
        finish_reasons: One per completion that has ended.
    """

    request_id: str
    num_prompt_tokens: int
    start_s: float
    sampling_params: SamplingParams | None = None
    timings: RequestMetrics | None = None
    end_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RequestTrace:
    """The trace of one HTTP request.

    Attributes:
        start_s: Arrival of its headers, in monotonic seconds.
        headers: Headers with the trace context of the caller.
        prompts: Its prompts in the engine; empty for requests that need no engine.
        num_prompts: The number of its prompts, traced or not.
        error: The name of the exception that ended it.
    """

    http_request_id: str
    method: str
    path: str
    start_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    prompts: list[PromptTrace] = field(default_factory=list)
    num_prompts: int = 0
    status: int = 0
    error: str | None = None

    def begin_prompt(self, prompt: PromptTrace) -> PromptTrace:
        """Adds a prompt, unless there are too many."""
        self.num_prompts += 1
        if len(self.prompts) < MAX_PROMPTS:
            self.prompts.append(prompt)
        return prompt


current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
