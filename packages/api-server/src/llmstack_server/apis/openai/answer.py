"""Ids and fields that the answers to completions and chats share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llmstack_server.apis.openai.chunks import ChunkEncoder
from llmstack_server.apis.openai.protocol import AnswerFields
from llmstack_server.protocols import OutputStream
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import AnswerIds
from llmstack_server.web.usage import UsageCounter, timings_object


class OpenAIAnswer:
    """Base of the answers to completions and chats: the request's prompts in the engine, and what all answers carry.

    Attributes:
        n: Completions per prompt.
        is_stream: Whether the client asked for a stream.
        includes_usage: Whether a stream ends with a chunk that counts tokens.
        includes_continuous_usage: Whether every chunk counts tokens; only together with the last one's.
        fingerprint_fields: Fields of the chunks that end a choice, and of the last one.
        shows_tokens_as_ids: Whether tokens of log-probabilities are `token_id:N`.
    """

    def __init__(
        self, state: ServerState, fields: AnswerFields, ids: AnswerIds, outputs: OutputStream, usage: UsageCounter
    ) -> None:
        answers, options = state.config.http.answers, fields.stream_options
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
        self.fingerprint_fields: dict[str, Any] = {"system_fingerprint": state.system_fingerprint}
        if (fields.model_extra or {}).get("service_tier") is not None:
            self.fingerprint_fields["service_tier"] = "default"
        self._state = state
        self._id = ids.answer
        self._model = fields.model or state.served_model_name
        self._created = int(time.time())

    def new_encoder(self, object_name: str) -> ChunkEncoder:
        """An encoder of the chunks of a stream."""
        return ChunkEncoder(self._id, object_name, self._created, self._model, self.includes_usage)

    def answer(self, object_name: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A whole answer; the choices may come in any order."""
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "choices": sorted(choices, key=lambda choice: choice["index"]),
            "usage": self.usage.as_object(),
            "service_tier": "default",
            "system_fingerprint": self._state.system_fingerprint,
            **self._timing_fields(),
        }

    def end_fields(self) -> dict[str, Any]:
        """Fields of the last chunk of a stream, where it counts tokens."""
        return {"usage": self.usage.as_object(), **self.fingerprint_fields, **self._timing_fields()}

    def _timing_fields(self) -> dict[str, Any]:
        """`metrics` for the end of an answer, where that was asked for and there is one completion to time."""
        is_single = len(self.outputs.prompts) == 1 and self.n == 1
        if not is_single or not self._state.config.observability.has_request_metrics:
            return {}
        return {"metrics": timings_object(self.usage.timings)}
