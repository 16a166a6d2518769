"""Checks of a request that reaches an engine core."""

from __future__ import annotations

from llmstack_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    InvalidRequestError,
    PoolingTask,
)


def check_request(request: EngineCoreRequest, ready: EngineReady) -> None:
    """Refuses a request that the model cannot serve, or whose token ids are not in its vocabulary.

    Raises:
        InvalidRequestError: Names the parameter.
    """
    if request.pooling_params is None:
        if not ready.is_generative:
            raise InvalidRequestError("The model only pools.", param="model")
    else:
        if not ready.embedding_size:
            raise InvalidRequestError("The model runner does not pool.", param="model")
        if request.pooling_params.task is PoolingTask.CLASSIFY and not ready.num_labels:
            raise InvalidRequestError("The model has no labels.", param="model")
    params = request.sampling_params
    for name, token_ids in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("output_token_ids", request.output_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < ready.vocab_size):
            raise InvalidRequestError(f"A token id in {name} is out of vocabulary.", param=name)


def error_output(request_id: str, error: str) -> EngineCoreOutput:
    """The output that ends one request with an error."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)
