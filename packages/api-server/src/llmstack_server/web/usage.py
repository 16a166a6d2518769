"""Token counts and timings of a request, over all of its prompts and choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, get_args

from llmstack_llm import RequestMetrics, RequestOutput
from llmstack_llm.requests import AdmittedRequest
from llmstack_types.vocabulary import FileKind

_COUNTED_KINDS: Final[tuple[FileKind, ...]] = get_args(FileKind)


class UsageCounter:
    """The `usage` object of one response, for the outputs so far.

    Attributes:
        timings: The timings of the last output.
        num_reasoning_tokens: Completion tokens of reasoning; None where they are not distinguished.
    """

    def __init__(self, prompts: Sequence[AdmittedRequest]) -> None:
        self.timings: RequestMetrics | None = None
        self.num_prompt_tokens = sum(prompt.num_prompt_tokens for prompt in prompts)
        self._prompts = prompts
        self.num_completion_tokens = 0
        self.num_reasoning_tokens: int | None = None
        self._prompt_index_to_num_cached = [0] * len(prompts)
        self._num_sent_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Counts the tokens of `output`, which has only new tokens, or is the only output.

        As at OpenAI, completions that `best_of` generated and did not choose count too.
        """
        for choice in output.outputs:
            self.num_completion_tokens += len(choice.token_ids)
        self.num_completion_tokens += output.num_dropped_tokens
        self.timings = output.metrics
        if output.num_cached_tokens is not None:
            self._prompt_index_to_num_cached[output.prompt_index] = output.num_cached_tokens

    def sent_object(self, num_new_tokens: int) -> dict[str, object]:
        """The object with the completion tokens sent so far, after so many more; for chunks of a stream."""
        self._num_sent_tokens += num_new_tokens
        usage = self.as_object()
        usage["completion_tokens"] = self._num_sent_tokens
        usage["total_tokens"] = self.num_prompt_tokens + self._num_sent_tokens
        return usage

    def as_object(self) -> dict[str, Any]:
        """The object of the API; a prompt counts once, whatever `n`."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._prompt_index_to_num_cached)},
        }
        for kind in _COUNTED_KINDS:
            if num_tokens := sum(prompt.num_media_tokens(kind) for prompt in self._prompts):
                usage["prompt_tokens_details"][f"{kind}_tokens"] = num_tokens
        if self.num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage


def timings_object(timings: RequestMetrics | None) -> dict[str, float | None]:
    """Timings of one completion in milliseconds; unknown ones are null, such as a mean over no intervals.

    `time_to_first_token_ms` counts from the request's arrival, so `queue_time_ms` is a part of it.
    """
    if timings is None:
        return dict.fromkeys(
            ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")
        )
    first_s, last_s, num_tokens = timings.first_token_time_s, timings.last_token_time_s, timings.num_generation_tokens
    generation_ms, inference_ms = _ms(first_s, last_s), _ms(timings.scheduled_time_s, last_s)
    return {
        "time_to_first_token_ms": _ms(timings.arrival_time_s, first_s),
        "generation_time_ms": generation_ms,
        "queue_time_ms": _ms(timings.arrival_time_s, timings.scheduled_time_s),
        "mean_itl_ms": None if generation_ms is None or num_tokens < 2 else round(generation_ms / (num_tokens - 1), 3),
        "tokens_per_second": round(1000 * num_tokens / inference_ms, 3) if inference_ms else None,
    }


def _ms(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else round(1000 * (end_s - start_s), 3)
