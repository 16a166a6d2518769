"""Answers of pooling routes that list one object per input."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from itertools import chain

from llmstack_llm import PoolingOutput, request_errors
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_server.apis.pooling.engine_run import count_tokens, run_all
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import AnswerIds, WholeAnswer
from llmstack_server.web.fields import PoolingFields
from llmstack_server.web.pauses import MadeItems, encoded, in_parts
from llmstack_server.web.sse import encode_json
from llmstack_types.json_values import JSONObject

ENCODING_FORMATS = ("float", "base64")
Describe = Callable[[int, PoolingOutput], JSONObject]


class ListAnswer(WholeAnswer):
    """The answer to one request, in the order of the inputs.

    `has_id`: Whether it has an id and a time, as on vLLM's own routes.
    `describe`: Makes the object of one input from its index and its numbers.
    """

    def __init__(
        self,
        state: ServerState,
        fields: PoolingFields,
        inputs: Sequence[AdmittedPooling],
        describe: Describe,
        ids: AnswerIds,
        *,
        has_id: bool = True,
    ) -> None:
        self._state = state
        self._fields = fields
        self._inputs = inputs
        self._describe = describe
        self._ids = ids
        self._has_id = has_id

    async def whole(self) -> list[bytes]:
        """The `list` object as JSON, with one object per input."""
        data: list[list[bytes]] = [[]] * len(self._inputs)
        async for index, output in run_all(self._state, self._inputs, self._fields, self._ids.engine):
            # Each object is encoded as it comes: encoding all at once takes a second.
            data[index] = await encoded(self._describe(index, output.outputs))
            await asyncio.sleep(0)  # all inputs of a step come at once
        rest = {"model": self._fields.model or self._state.served_model_name, "usage": self._usage()}
        return list_of_parts(f'{encode_json(self._head())[:-1]},"data":[', data, f"],{encode_json(rest)[1:]}")

    def _head(self) -> dict[str, object]:
        if not self._has_id:
            return {"object": "list"}
        return {"id": self._ids.answer, "object": "list", "created": int(time.time())}

    def _usage(self) -> JSONObject:
        num_tokens = count_tokens(self._inputs)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return usage | {"completion_tokens": 0, "prompt_tokens_details": None} if self._has_id else usage


def list_of_parts(before: str, items: Sequence[list[bytes]], after: str) -> list[bytes]:
    """The parts of JSON with a list, of whose items there is at least one."""
    pieces = (piece for item in items for piece in (b",", *item))
    next(pieces)
    return list(in_parts(chain([before.encode()], pieces, [after.encode()])))


def check_encoding_format(value: str | None) -> None:
    """Raises InvalidRequestError for an unknown format."""
    if value not in (None, *ENCODING_FORMATS):
        raise request_errors.invalid_value("encoding_format", f"expected one of {', '.join(ENCODING_FORMATS)}")


def encode_numbers(numbers: PoolingOutput, encoding_format: str | None) -> str | list[float] | MadeItems[list[float]]:
    """The numbers as JSON arrays, or as base64."""
    if encoding_format == "base64":
        return base64.b64encode(numbers.to_bytes()).decode()
    if numbers.num_vectors is None:
        return numbers.data.tolist()
    return MadeItems(numbers.num_vectors, numbers.vector)
