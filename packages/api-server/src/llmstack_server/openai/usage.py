"""Counts the tokens of a request, over all of its prompts and choices, and keeps the times of its last output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmstack_server.protocols import AdmittedPrompt, PromptOutput, Timings


class UsageCounter:
    """The `usage` object of one response, as far as it has come.

    Attributes:
        timings: Those of the output that came last.
        num_reasoning_tokens: Completion tokens of reasoning; None where nobody tells them from others.
    """

    def __init__(self, prompts: Sequence[AdmittedPrompt]) -> None:
        self.timings: Timings | None = None
        self.num_prompt_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
        self.num_completion_tokens = 0
        self.num_reasoning_tokens: int | None = None
        self._prompt_index_to_num_cached = [0] * len(prompts)

    def add(self, prompt_index: int, output: PromptOutput) -> None:
        """Counts what `output` brings; outputs hold only what is new, or come once.

        As at OpenAI, completions that `best_of` generated and did not choose count too.
        """
        for choice in output.outputs:
            self.num_completion_tokens += len(choice.token_ids)
        self.num_completion_tokens += output.num_dropped_tokens
        self.timings = output.metrics
        if output.num_cached_tokens is not None:
            self._prompt_index_to_num_cached[prompt_index] = output.num_cached_tokens

    def as_object(self) -> dict[str, Any]:
        """The object of the API; a prompt counts once, whatever `n`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._prompt_index_to_num_cached)},
        }
        if self.num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage
