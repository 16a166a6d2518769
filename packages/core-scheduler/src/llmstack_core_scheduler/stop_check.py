"""Decides whether a token ends its request."""

from __future__ import annotations

from dataclasses import dataclass

from llmstack_core_scheduler.request import Request
from llmstack_types import FinishReason, RequestStatus


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of a request: its status, and what has stopped it.

    Attributes:
        status: The state it ends in.
        finish_reason: The reason as the user sees it.
        stop_reason: The stop token id that ended it, None for any other cause.
    """

    status: RequestStatus
    finish_reason: FinishReason
    stop_reason: int | None = None


_END_OF_SEQUENCE = Stop(RequestStatus.FINISHED_STOPPED, FinishReason.STOP)
_REPETITION = Stop(RequestStatus.FINISHED_REPETITION, FinishReason.REPETITION)
_LENGTH = Stop(RequestStatus.FINISHED_LENGTH_CAPPED, FinishReason.LENGTH)


def append_until_stop(request: Request, sampled_token_ids: list[int]) -> tuple[list[int], Stop | None]:
    """Appends sampled tokens to the request, up to the one that ends it; what was appended, and that end."""
    token_ids = request.token_ids
    num_known_tokens = len(token_ids)
    if num_known_tokens >= request.max_num_tokens:  # max_tokens is 0: the prompt is all that was asked for
        return [], _LENGTH
    for token_id in sampled_token_ids:
        token_ids.append(token_id)
        if (
            token_id in request.ending_token_ids
            or len(token_ids) >= request.max_num_tokens
            or request.repetition is not None
        ):
            stop = check_stop(request)
            if stop is not None:
                return token_ids[num_known_tokens:], stop
    if len(token_ids) > request.num_tokens:  # the scheduler has waited for them
        request.num_tokens = len(token_ids)
    return sampled_token_ids, None


def check_stop(request: Request) -> Stop | None:
    """Whether the request ends with its last token, in this order: an ending token, its length, or a repetition.

    Only the length ends it before `min_tokens`.
    """
    num_tokens, token_id = len(request.token_ids), request.token_ids[-1]
    is_long_enough = num_tokens >= request.min_num_tokens
    if token_id in request.eos_token_ids and (is_long_enough or request.is_constrained):
        return _END_OF_SEQUENCE
    if token_id in request.stop_token_ids and is_long_enough:
        return Stop(RequestStatus.FINISHED_STOPPED, FinishReason.STOP, token_id)
    if num_tokens >= request.max_num_tokens:
        return _LENGTH
    is_repeating = request.repetition is not None and request.repetition.is_repeating(request.token_ids)
    return _REPETITION if is_repeating and is_long_enough else None
