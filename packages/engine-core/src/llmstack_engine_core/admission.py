"""Checks of a request that reaches an engine core."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from llmstack_engine_core.media_admission import check_media
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    InvalidRequestError,
    PoolingParams,
    PoolingTask,
    SamplingParams,
)
from llmstack_types.engine_core import TokenIds

MAX_BEAMS: Final = 1024
# What one output can carry in a message, with half of it to spare.
MAX_PROMPT_LOGPROBS: Final = 1 << 24
MAX_POOLED_NUMBERS: Final = 1 << 25

BEAM_MARK = "/beam-"
"""Separator in the id of a beam, between the id of its search and a number."""
AUDIT_MARK = "/audit-"
"""Beginning of the id of a request that audits the prefix cache."""


def check_request(request: EngineCoreRequest, ready: EngineReady) -> None:
    """Refuses a request that the model cannot serve, or whose fields are outside of what the model runner accepts.

    The sender has checked it already. The engine core does not rely on that: an error in a step would cost all running
    requests.

    Raises:
        InvalidRequestError: Names the parameter.
    """
    _check_token_ids(request, ready)
    params = request.sampling_params
    if request.media:
        check_media(request, ready)
    if request.pooling_params is not None:
        _check_pooling(request, request.pooling_params, ready)
    elif not ready.is_generative:
        raise InvalidRequestError("The model only pools.", param="model")
    _check_lists(params, ready)
    if (params.logprobs or 0) > ready.vocab_size:
        raise InvalidRequestError("There are more logprobs than tokens in the vocabulary.", param="logprobs")
    num_positions = len(request.prompt_token_ids) * (1 + (params.prompt_logprobs or 0))
    if params.prompt_logprobs is not None and num_positions > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"A request reports at most {MAX_PROMPT_LOGPROBS} log-probabilities of its prompt.", param="prompt_logprobs"
        )
    if params.use_beam_search:
        _check_beam_search(request, ready)


def _check_lists(params: SamplingParams, ready: EngineReady) -> None:
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise InvalidRequestError("No token is allowed.", param="allowed_token_ids", code="empty_array")
    if len(params.allowed_token_ids or ()) > ready.vocab_size:
        raise InvalidRequestError("More tokens are allowed than there are.", param="allowed_token_ids")
    if params.thinking_tags is not None and not params.thinking_tags.end_token_ids:
        raise InvalidRequestError("Nothing ends the reasoning.", param="thinking_tags")
    if not all(params.bad_words_token_ids):
        raise InvalidRequestError("A bad word has no tokens.", param="bad_words_token_ids")


def _check_token_ids(request: EngineCoreRequest, ready: EngineReady) -> None:
    params, tags = request.sampling_params, request.sampling_params.thinking_tags
    for name, token_ids in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("output_token_ids", request.output_token_ids),
        ("eos_token_ids", request.eos_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("forced_eos_token_id", None if params.forced_eos_token_id is None else (params.forced_eos_token_id,)),
        ("logit_bias", params.logit_bias),
        ("logprob_token_ids", params.logprob_token_ids),
        ("thinking_tags", tags and (*tags.start_token_ids, *tags.end_token_ids)),
        *(("bad_words_token_ids", sequence) for sequence in params.bad_words_token_ids),
    ):
        if token_ids and not _are_below(ready.vocab_size, token_ids):
            raise InvalidRequestError(f"A token id in {name} is out of vocabulary.", param=name)


def _are_below(vocab_size: int, token_ids: Collection[int]) -> bool:
    if isinstance(token_ids, TokenIds):
        return token_ids.largest < vocab_size
    return min(token_ids) >= 0 and max(token_ids) < vocab_size


def _check_pooling(request: EngineCoreRequest, pooling: PoolingParams, ready: EngineReady) -> None:
    params, num_tokens = request.sampling_params, len(request.prompt_token_ids)
    if not ready.embedding_size:
        raise InvalidRequestError("The model runner does not pool.", param="model")
    task = pooling.task or PoolingTask.EMBED
    if task.gives_labels and not ready.num_labels:
        raise InvalidRequestError("The model has no labels.", param="model")
    if params.max_tokens != 0 or request.output_token_ids or params.structured_outputs or params.use_beam_search:
        raise InvalidRequestError("A pooling request generates no tokens.", param="max_tokens")
    if pooling.dimensions is not None and pooling.dimensions > ready.embedding_size:
        raise InvalidRequestError("The model's vectors have fewer dimensions.", param="dimensions")
    if pooling.second_text_start is not None and pooling.second_text_start > num_tokens:
        raise InvalidRequestError("The second text begins after the prompt.", param="second_text_start")
    alignment_size = 0 if ready.media is None else ready.media.alignment_size
    if task is PoolingTask.ALIGNMENT and not alignment_size:
        raise InvalidRequestError("The model aligns no tokens.", param="model")
    if (
        task.is_per_token
        and num_tokens * max(ready.embedding_size, ready.num_labels, alignment_size) > MAX_POOLED_NUMBERS
    ):
        raise InvalidRequestError(f"A request returns at most {MAX_POOLED_NUMBERS} numbers.", param="prompt")


def _check_beam_search(request: EngineCoreRequest, ready: EngineReady) -> None:
    """A search is admitted as a whole with its last beam, so each beam is checked for what could refuse that."""
    params = request.sampling_params
    if params.structured_outputs is not None or request.output_token_ids or params.n > MAX_BEAMS:
        raise InvalidRequestError(
            f"A beam search has at most {MAX_BEAMS} beams, no constraint and no earlier tokens.",
            param="use_beam_search",
        )
    if len(request.prompt_token_ids) + max(params.max_tokens or 1, 1) > ready.max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {ready.max_model_len} tokens.",
            param="prompt",
            code="context_length_exceeded",
        )


def error_output(request_id: str, error: str) -> EngineCoreOutput:
    """The output that ends one request with an error."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)
