"""`POST /v1/embeddings` and `POST /pooling`."""

from __future__ import annotations

from typing import Any

from llmstack_llm import PoolingOutput
from llmstack_server.apis.pooling.inputs import admit_inputs, parse_inputs
from llmstack_server.apis.pooling.list_answer import ListAnswer, check_encoding_format, encode_numbers
from llmstack_server.apis.pooling.protocol import EmbeddingRequest, PoolingRequest
from llmstack_server.apis.pooling.unsupported import INPUTS, POOLING
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import claim_ids
from llmstack_server.web.checks import check_fields
from llmstack_server.web.fields import parse
from llmstack_types import PoolingParams, PoolingTask


async def prepare_embeddings(state: ServerState, body: dict[str, object]) -> ListAnswer:
    """Checks a request and tokenizes its inputs.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    fields = parse(EmbeddingRequest, body)
    prompts = parse_inputs(fields, body)
    check_fields(state, body, fields, INPUTS)
    check_encoding_format(fields.encoding_format)
    ids = await claim_ids(state, "embd", fields.request_id)
    normalize = fields.use_activation if fields.normalize is None else fields.normalize
    inputs = await admit_inputs(state, fields, prompts, _params(fields, normalize, task=PoolingTask.EMBED))

    def describe(index: int, numbers: PoolingOutput) -> dict[str, object]:
        embedding = encode_numbers(numbers, fields.encoding_format)
        return {"object": "embedding", "index": index, "embedding": embedding}

    return ListAnswer(state, fields, inputs, describe, ids, has_id=False)


async def prepare_pooling(state: ServerState, body: dict[str, object]) -> ListAnswer:
    """Checks a request for any pooling task, by default the model's own, and tokenizes its inputs.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    fields = parse(PoolingRequest, body)
    prompts = parse_inputs(fields, body)
    check_fields(state, body, fields, POOLING)
    check_encoding_format(fields.encoding_format)
    ids = await claim_ids(state, "pool", fields.request_id)
    # Admission checks whether the model has this task.
    params = _params(fields, fields.normalize, task=fields.task, use_activation=fields.use_activation)
    inputs = await admit_inputs(state, fields, prompts, params)

    def describe(index: int, numbers: PoolingOutput) -> dict[str, object]:
        return {"index": index, "object": "pooling", "data": encode_numbers(numbers, fields.encoding_format)}

    return ListAnswer(state, fields, inputs, describe, ids)


def _params(fields: EmbeddingRequest, normalize: bool | None, **more: Any) -> PoolingParams:
    return PoolingParams(
        normalize=normalize,
        dimensions=fields.dimensions,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        truncation_side=fields.truncation_side or "right",
        **more,
    )
