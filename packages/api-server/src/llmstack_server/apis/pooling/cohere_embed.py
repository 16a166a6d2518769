"""`POST /v2/embed`, in Cohere's form."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence

from llmstack_llm import PoolingOutput, request_errors
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_server.apis.pooling.engine_run import count_tokens, run_all
from llmstack_server.apis.pooling.inputs import admit_prompts
from llmstack_server.apis.pooling.protocol import CohereEmbedRequest
from llmstack_server.apis.pooling.scores import parse_texts
from llmstack_server.apis.pooling.unsupported import COHERE_EMBED
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import WholeAnswer, new_id
from llmstack_server.web.checks import check_fields
from llmstack_server.web.fields import parse
from llmstack_types import PoolingParams, PoolingTask
from llmstack_types.json_values import JSONObject

ENCODINGS = ("float", "base64")
# Input type to the names under which models configure the prefix of such texts.
_PREFIX_NAMES: Mapping[str, Sequence[str]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}
_SIDES: Mapping[str, str] = {"END": "right", "START": "left"}


async def prepare_cohere_embed(state: ServerState, body: dict[str, object]) -> CohereEmbedAnswer:
    """Checks a request and tokenizes its texts.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    fields = parse(CohereEmbedRequest, body)
    texts = parse_texts(fields.texts, "texts")
    check_fields(state, body, fields, COHERE_EMBED)
    encodings = fields.embedding_types or ["float"]
    for index, name in enumerate(encodings):
        if name not in ENCODINGS:
            reason = f"embeddings are {' or '.join(ENCODINGS)} here"
            raise request_errors.unsupported_value(f"embedding_types[{index}]", reason)
    prefix = _prefix(state, fields.input_type)
    prompts = [(prefix + text, f"texts[{index}]") for index, text in enumerate(texts)]
    params = _params(fields)
    inputs = await admit_prompts(state, prompts, params, fields.model, param_names={"dimensions": "output_dimension"})
    return CohereEmbedAnswer(state, fields, texts, encodings, inputs)


def _prefix(state: ServerState, input_type: str | None) -> str:
    """The prefix that the model uses for such texts; empty where its folder configures none, or without a type."""
    if input_type is None:
        return ""
    if input_type not in _PREFIX_NAMES:
        raise request_errors.invalid_value("input_type", f"expected one of {', '.join(_PREFIX_NAMES)}")
    known = state.engine.prompt_prefixes
    return next((known[name] for name in _PREFIX_NAMES[input_type] if name in known), "")


def _params(fields: CohereEmbedRequest) -> PoolingParams:
    """The pooling parameters; long texts are cut at their end unless `truncate` says otherwise, as at Cohere."""
    truncate = fields.truncate or "END"
    if truncate not in (*_SIDES, "NONE"):
        raise request_errors.invalid_value("truncate", "expected one of END, START, NONE")
    return PoolingParams(
        dimensions=fields.output_dimension,
        task=PoolingTask.EMBED,
        truncate_prompt_tokens=None if truncate == "NONE" else -1,
        truncation_side=_SIDES.get(truncate, "right"),
    )


class CohereEmbedAnswer(WholeAnswer):
    """The embeddings of one request, in Cohere's form."""

    def __init__(
        self,
        state: ServerState,
        fields: CohereEmbedRequest,
        texts: Sequence[str],
        encodings: Sequence[str],
        inputs: Sequence[AdmittedPooling],
    ) -> None:
        self._state = state
        self._fields = fields
        self._texts = texts
        self._encodings = dict.fromkeys(encodings)
        self._inputs = inputs

    async def whole(self) -> JSONObject:
        """Embeddings by their encodings, in the order of the texts."""
        answer_id = new_id("embd")
        found: dict[str, list[object]] = {name: [None] * len(self._inputs) for name in self._encodings}
        async for index, output in run_all(self._state, self._inputs, self._fields, answer_id):
            for name, embeddings in found.items():
                embeddings[index] = _encode(output.outputs, name)
            await asyncio.sleep(0)  # all texts of a step come at once
        return {
            "id": answer_id,
            "response_type": "embeddings_by_type",
            "embeddings": found,
            "texts": list(self._texts),
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": count_tokens(self._inputs)},
            },
        }


def _encode(numbers: PoolingOutput, encoding: str) -> object:
    return base64.b64encode(numbers.to_bytes()).decode() if encoding == "base64" else numbers.tolist()
