"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from typing import Any

from llmstack_llm import request_errors
from llmstack_server.openai.common import check_fields, new_id
from llmstack_server.openai.events import encode_json, merge
from llmstack_server.openai.models import check_model
from llmstack_server.openai.protocol import EmbeddingRequest, parse
from llmstack_server.openai.sampling import parse_prompts
from llmstack_server.openai.unsupported import EMBEDDINGS
from llmstack_server.protocols import AdmittedInput, Vector
from llmstack_server.state import ServerState
from llmstack_types import PoolingParams

MAX_NUM_INPUTS = 2048
"""As at OpenAI."""
MAX_NUM_IN_FLIGHT = 256
"""Inputs of one request that the engine holds at once: more would fill its queue, and 256 fill any step."""
ENCODING_FORMATS = ("float", "base64")


async def prepare_embeddings(state: ServerState, body: dict[str, Any]) -> EmbeddingsAnswer:
    """Checks a request and tokenizes its inputs.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """
    fields = parse(EmbeddingRequest, body)
    values, is_list = parse_prompts(fields.input, body, param="input")
    check_fields(state, body, fields, EMBEDDINGS)
    if fields.encoding_format not in (None, *ENCODING_FORMATS):
        raise request_errors.invalid_value("encoding_format", f"expected one of {', '.join(ENCODING_FORMATS)}")
    if len(values) > MAX_NUM_INPUTS:
        raise request_errors.array_too_long("input", MAX_NUM_INPUTS, len(values))
    params = PoolingParams(normalize=fields.normalize, dimensions=fields.dimensions)
    inputs = []
    for index, value in enumerate(values):
        param = f"input[{index}]" if is_list else "input"
        add_special_tokens = fields.add_special_tokens is not False
        inputs.append(
            await state.engine.admit_pooling(value, params, param=param, add_special_tokens=add_special_tokens)
        )
        await asyncio.sleep(0)  # short texts are tokenized on the event loop, and there may be thousands
    return EmbeddingsAnswer(state, fields, inputs)


class EmbeddingsAnswer:
    """The answer to one request for embeddings."""

    def __init__(self, state: ServerState, fields: EmbeddingRequest, inputs: Sequence[AdmittedInput]) -> None:
        self._state = state
        self._fields = fields
        self._inputs = inputs

    async def whole(self) -> bytes:
        """The `list` object, in the order of the inputs."""
        data = [""] * len(self._inputs)
        async for index, vector in self._vectors():
            # Each by itself, as it comes: the numbers of all of them take a second to write.
            data[index] = encode_json({"object": "embedding", "index": index, "embedding": self._encode(vector)})
        num_tokens = sum(len(one.prompt_token_ids) for one in self._inputs)
        rest = {
            "model": check_model(self._state, self._fields.model),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return f'{{"object":"list","data":[{",".join(data)}],{encode_json(rest)[1:]}'.encode()

    async def _vectors(self) -> AsyncIterator[tuple[int, Vector]]:
        encode, request_id = self._state.engine.encode, new_id("embd")
        priority, cache_salt = self._fields.priority or 0, self._fields.cache_salt or ""
        for start in range(0, len(self._inputs), MAX_NUM_IN_FLIGHT):
            streams = [
                encode(one, None, f"{request_id}-{index}", priority=priority, cache_salt=cache_salt)
                for index, one in enumerate(self._inputs[start : start + MAX_NUM_IN_FLIGHT], start)
            ]
            async for index, output in merge(streams):
                yield start + index, output.outputs

    def _encode(self, vector: Vector) -> list[float] | str:
        if self._fields.encoding_format == "base64":
            return base64.b64encode(vector.to_bytes()).decode()
        return vector.data.tolist()
