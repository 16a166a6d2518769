"""Fields of Responses requests and their types, and those not available."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from llmstack_llm import request_errors
from llmstack_server.web.fields import GenerationFields
from llmstack_server.web.peer_fields import PEERS
from llmstack_server.web.unsupported import COMMON, EFFORTS, VERBOSITIES, Predicate, check_word, one_of, word_of

MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
SUMMARIES = ("auto", "concise", "detailed")

LOGPROBS = "message.output_text.logprobs"
# All but the first concern hosted tools, which do not exist here, or are always included.
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip


class TextFields(BaseModel):
    """The `text` object: format and verbosity of the text."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: dict[str, object] | None = None
    verbosity: str | None = None


class ReasoningFields(BaseModel):
    """The `reasoning` object: effort and summary."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | None = None
    summary: str | None = None


class ResponseRequest(GenerationFields):
    """Body of `POST /v1/responses`."""

    input: object = Field(None, description="a string, or items: messages, function calls and their outputs, reasoning")
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, object] | None = None
    include_reasoning: bool | None = Field(None, description="whether the output has the reasoning")
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningFields | None = None
    safety_identifier: str | None = None
    text: TextFields | None = None
    tool_choice: object = Field(None, description="'none', 'auto', 'required', or an object that names functions")
    tools: list[dict[str, object]] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, object] | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the client asked for log-probabilities."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


def _has_no_obfuscation(value: object) -> bool:
    return value is None or (isinstance(value, dict) and not value.get("include_obfuscation"))


_NEVER = one_of()

UNSUPPORTED: Mapping[str, Predicate] = {
    **COMMON,
    **PEERS,
    "repetition_detection": _NEVER,
    "logprob_token_ids": one_of([]),
    "thinking_token_budget": _NEVER,
    "add_special_tokens": one_of(False),
    "enable_response_messages": one_of(False),
    "previous_input_messages": _NEVER,
    "request_id": _NEVER,
    "response_format": _NEVER,
    "background_options": one_of({}, {"completion_window": "soonest"}),
    "context_management": one_of([]),
    "conversation": _NEVER,
    "moderation": _NEVER,
    "prompt": _NEVER,
    "stream_options": _has_no_obfuscation,
    "truncation": word_of("truncation", "disabled", "auto"),
    "n": one_of(1),
    "best_of": one_of(1),
    "use_beam_search": one_of(False),
    "max_tokens": _NEVER,
    "prompt_logprobs": _NEVER,
    "return_token_ids": one_of(False),
    "prompt_embeds": one_of([]),
    "chat_template": _NEVER,
}


OF_COMPACTION = frozenset({
    "model", "input", "instructions", "previous_response_id", "prompt_cache_key", "service_tier", "cache_salt",
    "priority", "chat_template_kwargs",
})  # fmt: skip
"""The fields that a compaction has too."""


def check_words(fields: ResponseRequest) -> None:
    """Raises InvalidRequestError for an effort, a summary or a verbosity that OpenAI does not define."""
    if fields.reasoning is not None:
        check_word("reasoning.effort", fields.reasoning.effort, EFFORTS)
        check_word("reasoning.summary", fields.reasoning.summary, SUMMARIES)
    if fields.text is not None:
        check_word("text.verbosity", fields.text.verbosity, VERBOSITIES)


def check_metadata(metadata: Mapping[str, object] | None) -> None:
    """Raises InvalidRequestError for more or longer entries than OpenAI allows."""
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise request_errors.too_many_properties("metadata", MAX_METADATA_ENTRIES, len(metadata))
    for key, value in metadata.items():
        param = f"metadata.{request_errors.echo(key)}"
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise request_errors.string_too_long(param, MAX_METADATA_KEY_CHARS, len(key))
        if not isinstance(value, str):
            raise request_errors.invalid_type(param, "a string", value)
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise request_errors.string_too_long(param, MAX_METADATA_VALUE_CHARS, len(value))


def check_include(include: list[str] | None) -> None:
    """Raises InvalidRequestError for names that OpenAI does not define."""
    for index, name in enumerate(include or ()):
        if name not in INCLUDABLE:
            raise request_errors.invalid_value(f"include[{index}]", f"'{request_errors.echo(name)}' is not known")
