"""Ids and fields that the answers to completions and chats share."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from llmstack_llm import RequestOutput
from llmstack_server.apis.openai.chunks import ChunkEncoder
from llmstack_server.apis.openai.protocol import AnswerFields
from llmstack_server.state.answer_source import current_source
from llmstack_server.state.server_state import OutputStream, ServerState, Sign
from llmstack_server.web.answers import Answer, AnswerIds, Push
from llmstack_server.web.kv_transfer import NotedTransfer
from llmstack_server.web.sse import Events
from llmstack_server.web.usage import UsageCounter, timings_object
from llmstack_types.json_values import JSONObject


class OpenAIAnswer(Answer):
    """Base of the answers to completions and chats: the request's prompts in the engine, and what all answers carry.

    Attributes:
        n: Completions per prompt.
        includes_usage: Whether a stream ends with a chunk that counts tokens.
        includes_continuous_usage: Whether every chunk counts tokens; only together with the last one's.
        shows_tokens_as_ids: Whether tokens of log-probabilities are `token_id:N`.
        CHUNK_OBJECT: The `object` of a stream's chunks.
        encoder: The encoder of a stream's chunks.
    """

    CHUNK_OBJECT: ClassVar[str]
    encoder: ChunkEncoder

    def __init__(
        self, state: ServerState, fields: AnswerFields, ids: AnswerIds, outputs: OutputStream, usage: UsageCounter
    ) -> None:
        answers, options = state.config.http.answers, fields.stream_options
        self.sign: Sign | None = None
        if state.receipts is not None:
            outputs, self.sign = state.receipts.note(state, outputs)
            self._has_token_ids = bool(fields.return_token_ids)
        self._transfer: NotedTransfer | None = None
        if fields.kv_transfer_params is not None:
            outputs = self._transfer = NotedTransfer(outputs)
        self.outputs = outputs
        self.usage = usage
        self.n = outputs.prompts[0].sampling_params.n
        self.is_stream = bool(fields.stream)
        self.includes_usage = answers.forces_usage or (options is not None and bool(options.include_usage))
        self.includes_continuous_usage = answers.forces_usage or (
            self.includes_usage and options is not None and bool(options.continuous_usage_stats)
        )
        asked = fields.return_tokens_as_token_ids
        self.shows_tokens_as_ids = answers.shows_tokens_as_ids if asked is None else asked
        self._fingerprint_fields: dict[str, object] = {"system_fingerprint": state.system_fingerprint}
        if (fields.model_extra or {}).get("service_tier") is not None:
            self._fingerprint_fields["service_tier"] = "default"
        self._waits_for_weights = state.is_reloading and state.engine.is_exchanging
        self._state = state
        self._id, self._created, source = ids.answer, int(time.time()), current_source.get()
        if source is not None:
            self._id, self._created = source.lasting(self._id), source.lasting(self._created)
        self._model = fields.model or state.served_model_name
        if self.is_stream:
            self.encoder = ChunkEncoder(self._id, self.CHUNK_OBJECT, self._created, self._model, self.includes_usage)

    def push_by(self, push: Push) -> None:
        """Each output is encoded and sent as it comes."""
        self.outputs.follow(partial(push, self.encode))

    def fingerprint_fields(self) -> dict[str, object]:
        """Fields of the chunks that end a choice, and of the last one; the first call decides which weights they name.

        An answer that had waited for a reload has the weights that are here at its first end.
        """
        if self._waits_for_weights:
            self._waits_for_weights = False
            self._fingerprint_fields["system_fingerprint"] = self._state.system_fingerprint
        return self._fingerprint_fields

    @abstractmethod
    def encode(self, output: RequestOutput) -> Events:
        """The chunks of one output of a stream; empty while its text is withheld."""

    def answer(self, object_name: str, choices: Sequence[JSONObject]) -> JSONObject:
        """A whole answer; the choices may come in any order."""
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "choices": sorted(choices, key=lambda choice: choice["index"]),
            "usage": self.usage.as_object(),
            "service_tier": "default",
            **self.fingerprint_fields(),
            **self._timing_fields(),
            **self.receipt_fields(),
        }

    def receipt_fields(self) -> dict[str, object]:
        """`receipt` for the end of an answer, where the server signs them."""
        if self.sign is None:
            return {}
        return {"receipt": self.sign(self._id, self._model, self._created, has_token_ids=self._has_token_ids)}

    def transfer_fields(self) -> dict[str, object]:
        """`kv_transfer_params` of a whole answer: for the server that goes on, where the prompt was exported."""
        params = None if self._transfer is None else self._transfer.kv_transfer_params
        return {"kv_transfer_params": None if params is None else dict(params)}

    def end_fields(self) -> dict[str, object]:
        """Fields of the last chunk of a stream, where it counts tokens."""
        return {"usage": self.usage.as_object(), **self.fingerprint_fields(), **self._timing_fields()}

    def _timing_fields(self) -> dict[str, object]:
        """`metrics` for the end of an answer, where that was asked for and there is one completion to time."""
        is_single = len(self.outputs.prompts) == 1 and self.n == 1
        if not is_single or not self._state.config.observability.has_request_metrics:
            return {}
        return {"metrics": timings_object(self.usage.timings)}
