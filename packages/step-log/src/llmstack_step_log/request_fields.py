"""Encoding of `EngineCoreRequest` in a step log.

Fields that differ from their defaults, by name, with token ids packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Final

from llmstack_step_log.errors import StepLogError
from llmstack_step_log.packing import pack, packed_ints, unpack
from llmstack_types import (
    EngineCoreRequest,
    PoolingParams,
    PoolingTask,
    PoolingType,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)

# What only the front end and the sampler read: no decision depends on it, and it may hold a user's text.
_NOT_RECORDED: Final = frozenset(
    {
        "stop", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
        "output_kind", "best_of", "bad_words", "bad_words_token_ids", "extra_args", "kept_special_tokens",
        "stream_interval", "truncate_prompt_tokens", "truncation_side", "lora_path",
        "logprob_token_ids", "thinking_token_budget", "thinking_tags", "no_repeat_ngram_size", "kv_transfer",
    }
)  # fmt: skip
_PARAMS: Final = "sampling_params"
_POOLING: Final = "pooling_params"
_EMBEDS: Final = "prompt_embeds"
_STRUCTURED: Final = "structured_outputs"
_REPETITION: Final = "repetition_detection"
_NESTED: Final = frozenset({_PARAMS, _POOLING, _STRUCTURED, _REPETITION})


def _defaults(cls: type) -> dict[str, Any]:
    """Field name to default; `MISSING` where there is none."""
    return {field.name: field.default for field in fields(cls) if field.name not in _NOT_RECORDED}


_REQUEST_DEFAULTS: Final = _defaults(EngineCoreRequest)
_PARAMS_DEFAULTS: Final = _defaults(SamplingParams)
_POOLING_DEFAULTS: Final = _defaults(PoolingParams)
_REPETITION_DEFAULTS: Final = _defaults(RepetitionDetectionParams)
_STRUCTURED_DEFAULTS: Final = _defaults(StructuredOutputsParams)


def pack_request(request: EngineCoreRequest) -> bytes:
    """The request as one msgpack map; a new field of its class is recorded without a change here."""
    named = _changed(request, _REQUEST_DEFAULTS)
    named[_PARAMS] = _pack_params(request.sampling_params)
    if request.pooling_params is not None:
        named[_POOLING] = _changed(request.pooling_params, _POOLING_DEFAULTS)
    return pack(named)


def unpack_request(packed: bytes) -> EngineCoreRequest:
    """The inverse of `pack_request`; what was not recorded has its default.

    Raises:
        StepLogError: These packages have no such field, or it is no request.
    """
    try:
        named = unpack(packed, dict)
        params = _unpack_params(_known(named.pop(_PARAMS), _PARAMS_DEFAULTS))
        named = _known(named, _REQUEST_DEFAULTS)
        for name in ("eos_token_ids", "output_token_ids"):
            named[name] = tuple(named.get(name, ()))
        if _POOLING in named:
            named[_POOLING] = _pooling_params(_known(named[_POOLING], _POOLING_DEFAULTS))
        return EngineCoreRequest(sampling_params=params, **named)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise StepLogError(f"a request cannot be read: {str(error)[:100] or type(error).__name__}") from error


def _pack_params(params: SamplingParams) -> dict[str, Any]:
    named = _changed(params, _PARAMS_DEFAULTS)
    if params.structured_outputs is not None:
        named[_STRUCTURED] = _changed(params.structured_outputs, _STRUCTURED_DEFAULTS)
    if params.repetition_detection is not None:
        named[_REPETITION] = _changed(params.repetition_detection, _REPETITION_DEFAULTS)
    return named


def _unpack_params(named: dict[str, Any]) -> SamplingParams:
    if _STRUCTURED in named:
        structured = _known(named[_STRUCTURED], _STRUCTURED_DEFAULTS)
        if "choice" in structured:
            structured["choice"] = tuple(structured["choice"])
        named[_STRUCTURED] = StructuredOutputsParams(**structured)
    if _REPETITION in named:
        named[_REPETITION] = RepetitionDetectionParams(**_known(named[_REPETITION], _REPETITION_DEFAULTS))
    return SamplingParams(**named)


def _changed(data: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
    changed = {}
    for name, default in defaults.items():
        value = getattr(data, name)
        if name not in _NESTED and (default is MISSING or value != default):
            # Of vectors only that there were any: no decision depends on them, and they may be large.
            changed[name] = b"" if name == _EMBEDS else _packable(value)
    return changed


def _packable(value: Any) -> Any:
    if isinstance(value, list | tuple) and set(map(type, value)) == {int}:
        return packed_ints(list(value))
    return dict(value) if isinstance(value, Mapping) else value


def _pooling_params(named: dict[str, Any]) -> PoolingParams:
    if "pooling_type" in named:
        named["pooling_type"] = PoolingType(named["pooling_type"])
    if "task" in named:
        named["task"] = PoolingTask(named["task"])
    return PoolingParams(**named)


def _known(named: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    unknown = next((name for name in named if name not in defaults), None)
    if unknown is not None:
        raise StepLogError(f"these packages have no field {str(unknown)[:64]!r}")
    return named
