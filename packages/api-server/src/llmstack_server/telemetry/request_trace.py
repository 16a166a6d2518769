"""What is noted of one HTTP request on its way, for spans and for the lines of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from llmstack_server.protocols import Timings
from llmstack_types import SamplingParams

MAX_PROMPTS = 64
"""Prompts of one request that are noted one by one; a request may have a thousand."""


@dataclass(slots=True)
class PromptTrace:
    """One prompt in the engine.

    Attributes:
        sampling_params: None for a prompt that is pooled.
        timings: As far as they are known; None before the first output.
        finish_reasons: One per completion that has ended.
    """

    request_id: str
    num_prompt_tokens: int
    start_s: float
    sampling_params: SamplingParams | None = None
    timings: Timings | None = None
    end_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RequestTrace:
    """One HTTP request.

    Attributes:
        start_s: When its head had come, in monotonic seconds.
        headers: Those that carry the caller's trace.
        prompts: What it made the engine do; empty for requests that need no engine.
        num_prompts: How many of them there were, noted or not.
        error: Name of the exception that ended it.
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
        """Notes a prompt, unless there are too many."""
        self.num_prompts += 1
        if len(self.prompts) < MAX_PROMPTS:
            self.prompts.append(prompt)
        return prompt


current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
