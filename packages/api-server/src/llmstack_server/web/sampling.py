"""Prompts and sampling fields of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_llm import request_errors
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import GenerationFields, PoolingFields
from llmstack_server.web.structured import CONSTRAINT_FIELDS, structured_names, structured_outputs
from llmstack_types import RequestOutputKind, SamplingParams
from llmstack_types.field_facts import facts_of

INT32_MAX = 2**31 - 1
MAX_CACHE_SALT_CHARS = 128
STREAM_FIELDS = frozenset({"stream_options", "prompt_logprobs"})
MAX_DEADLINE_MS = 999_999_999
CONTROL_FIELDS = frozenset({"priority", "cache_salt", "deadline_ms"})
# Fields of a request with the name and the meaning of one of `SamplingParams`.
SAMPLING_FIELDS = frozenset(name for name, facts in facts_of(SamplingParams).items() if facts.given_by != "none")


# Names that requests have for fields of `SamplingParams`.
PARAM_NAMES: Mapping[str, str] = {"extra_args": "vllm_xargs"}


def given_sampling(fields: GenerationFields, names: Mapping[str, str]) -> tuple[dict[str, Any], Mapping[str, str]]:
    """The sampling fields that a request gives, unchecked, and its names of them; null means the default.

    `names`: Names of the API where they differ from `SamplingParams`; those of this request's constraint are added.
    """
    given: dict[str, Any] = {"output_kind": RequestOutputKind.DELTA if fields.stream else RequestOutputKind.FINAL_ONLY}
    for name in SAMPLING_FIELDS & fields.model_fields_set:
        value = getattr(fields, name)
        if value is not None:
            given[name] = value
    if fields.vllm_xargs is not None:
        given["extra_args"] = fields.vllm_xargs
    if not CONSTRAINT_FIELDS.isdisjoint(fields.model_fields_set):
        constraint = structured_outputs(fields)
        if constraint is not None:
            given["structured_outputs"] = constraint
            names = {**names, **structured_names(fields)}
    return given, names


def check_stream_options(fields: GenerationFields) -> None:
    """Raises InvalidRequestError for stream options without a stream, and for fields that a stream cannot have."""
    if fields.stream_options is not None and not fields.stream:
        raise request_errors.invalid_value("stream_options", "it is only allowed together with 'stream': true")
    if fields.prompt_logprobs is not None and fields.stream:
        raise request_errors.invalid_value("prompt_logprobs", "it is not available together with 'stream': true")


def check_control_fields(fields: GenerationFields | PoolingFields) -> None:
    """Raises InvalidRequestError for a priority, salt or deadline out of range."""
    if fields.priority is not None:
        if fields.priority > INT32_MAX:
            raise request_errors.above_max("priority", INT32_MAX, fields.priority, is_integer=True)
        if fields.priority < -INT32_MAX:
            raise request_errors.below_min("priority", -INT32_MAX, fields.priority, is_integer=True)
    if fields.cache_salt is not None and len(fields.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise request_errors.string_too_long("cache_salt", MAX_CACHE_SALT_CHARS, len(fields.cache_salt))
    if isinstance(fields, GenerationFields):
        check_deadline_ms(fields.deadline_ms)


def check_deadline_ms(deadline_ms: int | None) -> None:
    """Raises InvalidRequestError for a deadline out of range."""
    if deadline_ms is None:
        return
    if deadline_ms < 1:
        raise request_errors.below_min("deadline_ms", 1, deadline_ms, is_integer=True)
    if deadline_ms > MAX_DEADLINE_MS:
        raise request_errors.above_max("deadline_ms", MAX_DEADLINE_MS, deadline_ms, is_integer=True)


def parse_prompts(value: object, body: dict[str, Any], *, param: str = "prompt") -> tuple[list[str | list[int]], bool]:
    """The prompts in the field `param` of a request, and whether it is a list of prompts.

    Checks types only; admission checks whether ids are in the vocabulary.

    Raises:
        InvalidRequestError: Missing, empty, or of a wrong type.
    """
    if value is None:
        message = "Either prompt or prompt_embeds must be provided and non-empty." if "prompt_embeds" in body else None
        raise missing_parameter(param, message)
    if isinstance(value, str):
        return [value], False
    if not isinstance(value, list):
        raise request_errors.invalid_type(param, "a string or an array", value)
    if not value:
        raise request_errors.empty_array(param)
    if all(isinstance(entry, str) for entry in value):
        return list(value), True
    if isinstance(value[0], list):
        return [_token_ids(entry, f"{param}[{index}]") for index, entry in enumerate(value)], True
    if isinstance(value[0], str):
        index, other = next((index, entry) for index, entry in enumerate(value) if not isinstance(entry, str))
        raise request_errors.invalid_type(f"{param}[{index}]", "a string", other)
    return [_token_ids(value, param)], False


def _token_ids(value: object, param: str) -> list[int]:
    if not isinstance(value, list):
        raise request_errors.invalid_type(param, "an array of token ids", value)
    if not value:
        raise request_errors.empty_array(param)
    if set(map(type, value)) != {int}:
        index, entry = next((index, entry) for index, entry in enumerate(value) if type(entry) is not int)
        reason = f"expected a token id, but got {request_errors.type_name(entry)} instead"
        raise request_errors.invalid_value(f"{param}[{index}]", reason)
    return value
