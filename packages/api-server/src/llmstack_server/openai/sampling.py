"""From the fields of a request to prompts and sampling parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

from llmstack_llm import request_errors
from llmstack_server.http.errors import missing_parameter
from llmstack_server.openai.protocol import GenerationFields, PoolingFields
from llmstack_server.openai.structured import structured_names, structured_outputs
from llmstack_types import RequestOutputKind, SamplingParams

INT32_MAX = 2**31 - 1
MAX_CACHE_SALT_CHARS = 128
# Fields of a request with the name and the meaning of one of `SamplingParams`.
SAMPLING_FIELDS = (
    "n", "best_of", "use_beam_search", "length_penalty", "early_stopping",
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens",
    "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "allowed_token_ids",
    "typical_p", "bad_words", "stream_interval", "truncate_prompt_tokens", "truncation_side",
)  # fmt: skip


# What requests call the fields of `SamplingParams` that have another name there.
PARAM_NAMES = {"extra_args": "vllm_xargs"}


def param_names(fields: GenerationFields) -> dict[str, str]:
    """What this request calls the fields of `SamplingParams`, and the parts of its constraint."""
    return {**PARAM_NAMES, **structured_names(fields)}


def sampling_params(fields: GenerationFields, defaults: SamplingParams, **overrides: Any) -> SamplingParams:
    """`defaults` with what the request gives; null means the default, and falsy values are values.

    Of the model's defaults a beam search takes the length alone: the others say how to draw.
    """
    if fields.use_beam_search:
        defaults = SamplingParams(max_tokens=defaults.max_tokens)
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(fields, name)) is not None}
    if fields.vllm_xargs is not None:
        given["extra_args"] = fields.vllm_xargs
    constraint = structured_outputs(fields)
    if constraint is not None:
        given["structured_outputs"] = constraint
    kind = RequestOutputKind.DELTA if fields.stream else RequestOutputKind.FINAL_ONLY
    return dataclasses.replace(defaults, **(given | overrides), output_kind=kind)


def check_stream_options(fields: GenerationFields) -> None:
    """Raises InvalidRequestError for options of a stream that is none, and for what a stream cannot bring."""
    if fields.stream_options is not None and not fields.stream:
        raise request_errors.invalid_value("stream_options", "it is only allowed together with 'stream': true")
    if fields.prompt_logprobs is not None and fields.stream:
        raise request_errors.invalid_value("prompt_logprobs", "it is not available together with 'stream': true")


def check_control_fields(fields: GenerationFields | PoolingFields) -> None:
    """Raises InvalidRequestError for a priority or a salt that the engine's messages cannot hold."""
    if fields.priority is not None:
        if fields.priority > INT32_MAX:
            raise request_errors.above_max("priority", INT32_MAX, fields.priority, is_integer=True)
        if fields.priority < -INT32_MAX:
            raise request_errors.below_min("priority", -INT32_MAX, fields.priority, is_integer=True)
    if fields.cache_salt is not None and len(fields.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise request_errors.string_too_long("cache_salt", MAX_CACHE_SALT_CHARS, len(fields.cache_salt))


def parse_prompts(value: Any, body: dict[str, Any], *, param: str = "prompt") -> tuple[list[str | list[int]], bool]:
    """The prompts of a request, which its user calls `param`, and whether they came as a list of several.

    Types only: whether an id is in the vocabulary is decided at admission.

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
    return [_token_ids(value, param)], False


def _token_ids(value: Any, param: str) -> list[int]:
    if not isinstance(value, list):
        raise request_errors.invalid_type(param, "an array of token ids", value)
    if not value:
        raise request_errors.empty_array(param)
    if set(map(type, value)) != {int}:
        index, entry = next((index, entry) for index, entry in enumerate(value) if type(entry) is not int)
        reason = f"expected a token id, but got {request_errors.type_name(entry)} instead"
        raise request_errors.invalid_value(f"{param}[{index}]", reason)
    return value
