"""`POST /api/embed` and its older form `POST /api/embeddings`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_server.apis.ollama.keep_alive import keep_model
from llmstack_server.apis.ollama.names import Fields, plain_name, without_tag
from llmstack_server.apis.ollama.protocol import FIELDS, EmbedRequest, OlderEmbedRequest
from llmstack_server.apis.pooling.engine_run import count_tokens, run_all
from llmstack_server.apis.pooling.inputs import admit_prompts
from llmstack_server.apis.pooling.list_answer import list_of_parts
from llmstack_server.apis.pooling.scores import parse_texts
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import WholeAnswer, new_id
from llmstack_server.web.checks import check_fields
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import PoolingFields, parse
from llmstack_server.web.pauses import encoded
from llmstack_server.web.sse import encode_json
from llmstack_types import PoolingParams, PoolingTask

_TO_WHAT_FITS = -1


async def prepare_embed(state: ServerState, body: Fields) -> EmbedAnswer:
    """Checks a request and tokenizes its texts; longer ones are cut at their end unless it says otherwise.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    body = without_tag(state, body)
    fields = parse(EmbedRequest, body)
    check_fields(state, body, fields, FIELDS)
    keep_model(state, fields.keep_alive)
    if fields.input is None:
        raise missing_parameter("input")
    is_list = not isinstance(fields.input, str)
    texts = parse_texts(fields.input if is_list else [fields.input], "input")
    prompts = [(text, f"input[{index}]" if is_list else "input") for index, text in enumerate(texts)]
    params = PoolingParams(
        task=PoolingTask.EMBED,
        dimensions=fields.dimensions,
        truncate_prompt_tokens=None if fields.truncate is False else _TO_WHAT_FITS,
    )
    inputs = await admit_prompts(state, prompts, params, fields.model)
    return EmbedAnswer(state, fields.model, inputs)


async def prepare_older_embed(state: ServerState, body: Fields) -> OlderEmbedAnswer:
    """Does the same for one text."""
    body = without_tag(state, body)
    fields = parse(OlderEmbedRequest, body)
    check_fields(state, body, fields, FIELDS)
    keep_model(state, fields.keep_alive)
    if fields.prompt is None:
        raise missing_parameter("prompt")
    params = PoolingParams(task=PoolingTask.EMBED, truncate_prompt_tokens=_TO_WHAT_FITS)
    inputs = await admit_prompts(state, [(fields.prompt, "prompt")], params, fields.model)
    return OlderEmbedAnswer(state, fields.model, inputs)


class EmbedAnswer(WholeAnswer):
    """The vectors of one request, in the order of its texts."""

    def __init__(self, state: ServerState, model: str | None, inputs: Sequence[AdmittedPooling]) -> None:
        self._state = state
        self._model = model
        self._inputs = inputs

    async def whole(self) -> list[bytes]:
        """The object with `embeddings` as JSON."""
        before = f'{{"model":{encode_json(plain_name(self._state, self._model))},"embeddings":['
        vectors = await self.vectors()
        return list_of_parts(before, vectors, f'],"prompt_eval_count":{count_tokens(self._inputs)}}}')

    async def vectors(self) -> list[list[bytes]]:
        """Runs all inputs. Each vector becomes JSON as it comes: encoding all at once would hold others for seconds."""
        vectors: list[list[bytes]] = [[]] * len(self._inputs)
        fields = parse(PoolingFields, {"model": self._model})
        async for index, output in run_all(self._state, self._inputs, fields, new_id("embd")):
            vectors[index] = await encoded(output.outputs.tolist())
            await asyncio.sleep(0)  # all texts of a step come at once
        return vectors


class OlderEmbedAnswer(EmbedAnswer):
    """The vector of one text."""

    async def whole(self) -> list[bytes]:
        """The object with `embedding` as JSON."""
        [vector] = await self.vectors()
        return [b'{"embedding":', *vector, b"}"]
