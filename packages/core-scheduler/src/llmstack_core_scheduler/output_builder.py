"""Turns one row's results into the message for the request's user."""

from __future__ import annotations

from typing import Final

from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.stop_check import Stop
from llmstack_types import EngineCoreOutput, FinishReason, ModelRunnerOutput, TokenLogprobs

# The other fields of a message that has tokens only.
NOTHING_ELSE: Final = tuple(EngineCoreOutput._field_defaults.values())


def build_output(
    request: Request, new_token_ids: list[int], stop: Stop | None, output: ModelRunnerOutput
) -> EngineCoreOutput:
    """The message about new tokens; the first of a request carries what is sent once.

    Args:
        request: The request, its tokens already appended.
        new_token_ids: The new tokens.
        stop: How the last of them ended the request, if it did.
        output: The step's results, for log-probabilities.
    """
    is_first = len(request.token_ids) - len(new_token_ids) == request.num_prompt_tokens
    request.has_more_to_tell = request.wants_logprobs
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        logprobs=_logprobs(request, len(new_token_ids), output),
        prompt_logprobs=_take_prompt_logprobs(request),
        finish_reason=stop.finish_reason if stop else None,
        stop_reason=stop.stop_reason if stop else None,
        num_cached_tokens=request.num_cached_tokens if is_first else -1,
    )


def build_error(request: Request, error: str) -> EngineCoreOutput:
    """The message that a request has failed."""
    return EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=error)


def build_pooled(request: Request, output: ModelRunnerOutput) -> EngineCoreOutput:
    """The message that ends a pooling request; its vector only passes through here."""
    return EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=FinishReason.STOP,
        num_cached_tokens=request.num_cached_tokens,
        pooled=output.pooled.get(request.request_id),
    )


def _logprobs(request: Request, num_tokens: int, output: ModelRunnerOutput) -> list[TokenLogprobs] | None:
    if not request.wants_logprobs:
        return None
    return list(output.logprobs.get(request.request_id, ()))[:num_tokens]


def _take_prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    collected, request.prompt_logprobs = request.prompt_logprobs, None
    return collected
