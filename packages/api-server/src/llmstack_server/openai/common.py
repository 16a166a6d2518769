"""The checks and facts that completions and chat share."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from llmstack_llm import request_errors
from llmstack_server.http.errors import unknown_parameter
from llmstack_server.openai.events import ChunkEncoder, merge
from llmstack_server.openai.models import check_model
from llmstack_server.openai.protocol import AnswerFields, GenerationFields, PoolingFields, unknown_fields
from llmstack_server.openai.sampling import check_control_fields, check_stream_options
from llmstack_server.openai.timings import timings_object
from llmstack_server.openai.unsupported import IGNORED, Predicate, check_unsupported
from llmstack_server.openai.usage import UsageCounter
from llmstack_server.protocols import AdmittedPrompt, PromptOutput
from llmstack_server.state import ServerState

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128


@dataclass(frozen=True, slots=True)
class AnswerIds:
    """The id that an answer carries, and the one that its request has in the engine: the first may come twice."""

    answer: str
    engine: str


@dataclass(slots=True)
class Generation:
    """One checked request: its prompts, and what every answer to it carries.

    Attributes:
        ids: Of the answer, and of the request in the engine.
    """

    state: ServerState
    fields: AnswerFields
    model: str
    prompts: Sequence[AdmittedPrompt]
    ids: AnswerIds
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def n(self) -> int:
        """Completions per prompt."""
        return self.prompts[0].sampling_params.n

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for a stream."""
        return bool(self.fields.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        options = self.fields.stream_options
        return self.state.config.http.answers.forces_usage or (options is not None and bool(options.include_usage))

    @property
    def includes_continuous_usage(self) -> bool:
        """Whether every chunk counts tokens; only together with the last one's."""
        options = self.fields.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def shows_tokens_as_ids(self) -> bool:
        """Whether tokens of log-probabilities are `token_id:N`."""
        asked = self.fields.return_tokens_as_token_ids
        return self.state.config.http.answers.shows_tokens_as_ids if asked is None else asked

    def new_usage(self) -> UsageCounter:
        """A counter at zero."""
        return UsageCounter(self.prompts)

    def new_encoder(self, object_name: str) -> ChunkEncoder:
        """What encodes the chunks of a stream."""
        return ChunkEncoder(self.ids.answer, object_name, self.created, self.model, self.includes_usage)

    def answer(self, object_name: str, choices: Sequence[dict[str, Any]], usage: UsageCounter) -> dict[str, Any]:
        """A whole answer; the choices may come in any order."""
        return {
            "id": self.ids.answer,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": sorted(choices, key=lambda choice: choice["index"]),
            "usage": usage.as_object(),
            "system_fingerprint": self.state.system_fingerprint,
            **self.timing_fields(usage),
        }

    def end_fields(self, usage: UsageCounter) -> dict[str, Any]:
        """What the last chunk of a stream says, where it counts tokens."""
        return {"usage": usage.as_object(), **self.fingerprint_fields, **self.timing_fields(usage)}

    @property
    def fingerprint_fields(self) -> dict[str, Any]:
        """For the chunks of a stream that end a choice, and for its last one."""
        return {"system_fingerprint": self.state.system_fingerprint}

    def timing_fields(self, usage: UsageCounter) -> dict[str, Any]:
        """`metrics` for the end of an answer, where that was asked for and there is one completion to time."""
        is_single = len(self.prompts) == 1 and self.n == 1
        if not is_single or not self.state.config.observability.has_request_metrics:
            return {}
        return {"metrics": timings_object(usage.timings)}

    def outputs(self) -> AsyncIterator[tuple[int, PromptOutput]]:
        """Starts the request in the engine: outputs with the index of their prompt."""
        generate = self.state.engine.generate
        priority, cache_salt = self.fields.priority or 0, self.fields.cache_salt or ""
        return merge(
            [
                generate(prompt, None, f"{self.ids.engine}-{index}", priority=priority, cache_salt=cache_salt)
                for index, prompt in enumerate(self.prompts)
            ]
        )


def new_id(prefix: str) -> str:
    """A fresh id; never the client's, which may come twice."""
    return f"{prefix}-{uuid.uuid4().hex}"


def answer_ids(prefix: str, given: str | None) -> AnswerIds:
    """Fresh ids, or such as begin with what the client gave.

    Raises:
        InvalidRequestError: It is too long, or has characters that a log should not show.
    """
    if given is None:
        fresh = new_id(prefix)
        return AnswerIds(fresh, fresh)
    if not 0 < len(given) <= MAX_REQUEST_ID_CHARS or not all("!" <= char <= "~" for char in given):
        reason = f"expected 1 to {MAX_REQUEST_ID_CHARS} visible ASCII characters"
        raise request_errors.invalid_value("request_id", reason)
    return AnswerIds(f"{prefix}-{given}", new_id(f"{prefix}-{given}"))


def check_fields(
    state: ServerState, body: dict[str, Any], fields: BaseModel, unsupported: Mapping[str, Predicate]
) -> None:
    """The checks after those of types that need no engine.

    Raises:
        InvalidRequestError: In the order of the contract: model, fields that are not available, combinations.
    """
    check_model(state, getattr(fields, "model", None))
    check_unsupported(body, unsupported)
    _count_unknown(state, fields, unsupported)
    if isinstance(fields, GenerationFields):
        check_stream_options(fields)
    if isinstance(fields, GenerationFields | PoolingFields):
        check_control_fields(fields)


def _count_unknown(state: ServerState, fields: BaseModel, known: Mapping[str, Predicate]) -> None:
    unknown = [name for name in unknown_fields(fields) if name not in known and name not in IGNORED]
    if not unknown:
        return
    if state.config.http.is_strict_params:
        raise unknown_parameter(unknown[0])
    state.metrics.unknown_parameters.inc(len(unknown))
    logger.debug("ignored %d unknown request fields", len(unknown))
