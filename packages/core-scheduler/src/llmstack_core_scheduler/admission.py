"""Admission checks: requests that can never run to their end are refused."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Container, Sequence

from llmstack_core_scheduler.block_needs import BlockNeeds
from llmstack_core_scheduler.request import Request
from llmstack_types import EngineCoreRequest, InvalidRequestError
from llmstack_types.engine_core import TokenIds

MAX_TOKEN_ID = 2**31 - 1
_HIGHEST_BYTE = 3 if sys.byteorder == "little" else 0


def longest_length(request: EngineCoreRequest, max_model_len: int, needs: BlockNeeds) -> int:
    """Most tokens that the request can grow to, prompt and output together.

    Raises:
        InvalidRequestError: The prompt is empty or holds what is no token id, or that many tokens fit neither the
            context nor the whole pool.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    if not num_prompt_tokens:
        raise InvalidRequestError("The prompt has no tokens.", param="prompt", code="empty_array")
    if not _are_token_ids(request.prompt_token_ids):
        raise InvalidRequestError(f"A token id of the prompt is not in [0, {MAX_TOKEN_ID}].", param="prompt_token_ids")
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is not None and max_tokens < 0:
        raise InvalidRequestError(f"max_tokens must be at least 0, got {max_tokens}.", param="max_tokens")
    if max_tokens is None:
        max_tokens = max(max_model_len - num_prompt_tokens, 1)
    _check_outputs(request, max_tokens)
    num_tokens = num_prompt_tokens + max_tokens
    if num_tokens > max_model_len:
        raise _too_long("This model's maximum context length is", max_model_len, num_prompt_tokens, max_tokens)
    # The last token is sampled but never fed back: it needs no slot.
    num_slots = max(num_prompt_tokens, num_tokens - 1)
    if not needs.fit_pool(num_slots):
        capacity = needs.longest_length(num_slots)
        raise _too_long("The KV cache has room for", capacity, num_prompt_tokens, max_tokens)
    return num_tokens


def _are_token_ids(token_ids: Sequence[int]) -> bool:
    """Whether these are integers of 31 bits: the cache would refuse others in the midst of a step."""
    if isinstance(token_ids, TokenIds):
        return token_ids.largest <= MAX_TOKEN_ID
    try:
        packed = array("I", token_ids)  # four times as fast as "i"
    except (TypeError, OverflowError):
        return False
    return packed.tobytes()[_HIGHEST_BYTE::4].isascii()


def _check_outputs(request: EngineCoreRequest, max_tokens: int) -> None:
    token_ids = request.output_token_ids
    if token_ids and (len(token_ids) >= max_tokens or not _are_token_ids(token_ids)):
        raise InvalidRequestError(
            f"A request of up to {max_tokens} tokens cannot go on from {len(token_ids)}, each in [0, {MAX_TOKEN_ID}].",
            param="output_token_ids",
        )


def check_id(request: EngineCoreRequest, in_use: Container[str]) -> None:
    """Checks that no other request has the id.

    Raises:
        InvalidRequestError: One has.
    """
    if request.request_id in in_use:
        text = f"The request id '{request.request_id[:64]}' is in use."
        raise InvalidRequestError(text, param="request_id", code="duplicate_request_id")


def check_block_sharing(child: EngineCoreRequest, parent: Request) -> None:
    """Checks that two requests may share blocks.

    Raises:
        InvalidRequestError: Their salts or adapters differ.
    """
    for name in ("cache_salt", "lora_name"):
        if getattr(child, name) != getattr(parent.arrival, name):
            raise InvalidRequestError(f"The {name} of a fork must be that of its parent.", param=name)


def check_fork(child: EngineCoreRequest, parent: Request) -> None:
    """Checks that `child.fork_of` may name `parent`.

    Raises:
        InvalidRequestError: Their prompts, salts or adapters differ.
    """
    check_block_sharing(child, parent)
    ours, theirs = ([(item.digest, item.offset) for item in one.media] for one in (child, parent.arrival))
    if child.prompt_token_ids != parent.arrival.prompt_token_ids or ours != theirs:
        raise InvalidRequestError("The prompt of a fork must be that of its parent.", param="fork_of")


def _too_long(limit: str, max_tokens_in_all: int, num_prompt_tokens: int, max_tokens: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{limit} {max_tokens_in_all} tokens. However, you requested {num_prompt_tokens + max_tokens} tokens "
        f"({num_prompt_tokens} in the prompt, {max_tokens} for the completion).",
        param="prompt",
        code="context_length_exceeded",
    )
