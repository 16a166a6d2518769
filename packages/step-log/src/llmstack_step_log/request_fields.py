"""Encoding of `EngineCoreRequest` in a step log.

Fields that differ from their defaults, by name, with token ids packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Final

from llmstack_step_log.errors import StepLogError
from llmstack_step_log.packing import pack, packed_ints, unpack
from llmstack_types import (
    EngineCoreRequest,
    MediaItem,
    PoolingParams,
    PoolingTask,
    PoolingType,
    PrefixMedia,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from llmstack_types.field_facts import facts_of

# What only the front end and the sampler read: no decision depends on it, and it may hold a user's text.
_NOT_RECORDED: Final = frozenset(
    {
        "lora_path", "kv_transfer", "memory",
        *(name for name, facts in facts_of(SamplingParams).items() if not facts.is_recorded),
    }
)  # fmt: skip
# Fields that are objects; they come last, in the order of their class, and are left out where there is none.
_NESTED: Final[Mapping[str, type]] = {
    "sampling_params": SamplingParams, "pooling_params": PoolingParams,
    "structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams,
}  # fmt: skip
_FROM_PLAIN: Final[Mapping[str, Callable[[Any], Any]]] = {
    "eos_token_ids": tuple, "output_token_ids": tuple, "choice": tuple,
    "pooling_type": PoolingType, "task": PoolingTask, "layout": tuple,
    "embed_runs": lambda runs: tuple((start, length) for start, length in runs),
    "media": lambda items: tuple(_from_plain(MediaItem, item) for item in items),
}  # fmt: skip
_DEFAULTS: Final = {
    cls: {field.name: field.default for field in fields(cls) if field.name not in _NOT_RECORDED}
    for cls in (EngineCoreRequest, MediaItem, *_NESTED.values())
}
"""Of each class, field name to default; `MISSING` where there is none."""


def pack_request(request: EngineCoreRequest) -> bytes:
    """The request as one msgpack map; a new field of its class is recorded without a change here."""
    return pack(_to_plain(request))


def unpack_request(packed: bytes) -> EngineCoreRequest:
    """The inverse of `pack_request`; what was not recorded has its default.

    Raises:
        StepLogError: These packages have no such field, or it is no request.
    """
    try:
        request: EngineCoreRequest = _from_plain(EngineCoreRequest, unpack(packed, dict))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise StepLogError(f"a request cannot be read: {str(error)[:100] or type(error).__name__}") from error
    return request


def pack_media(media: PrefixMedia) -> bytes:
    """Items as in `pack_request`, with the salt that they are numbered under."""
    return pack([media.cache_salt.encode("utf-8", "surrogatepass"), _packable(media.items)])


def unpack_media(packed: bytes) -> PrefixMedia:
    """The inverse of `pack_media`.

    Raises:
        StepLogError: It is something else.
    """
    try:
        cache_salt, items = unpack(packed, list)
        return PrefixMedia(str(cache_salt, "utf-8", "surrogatepass"), _FROM_PLAIN["media"](items))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise StepLogError(f"items cannot be read: {str(error)[:100] or type(error).__name__}") from error


def _to_plain(data: object) -> dict[str, Any]:
    plain, nested = {}, {}
    for name, default in _DEFAULTS[type(data)].items():
        value = getattr(data, name)
        if name in _NESTED:
            if value is not None:
                nested[name] = _to_plain(value)
        elif default is MISSING or value != default:
            plain[name] = _packable(value)
    return plain | nested


def _packable(value: object) -> Any:
    if isinstance(value, list | tuple) and set(map(type, value)) == {int}:
        return packed_ints(list(value))
    if isinstance(value, tuple) and set(map(type, value)) == {MediaItem}:
        return [_to_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _from_plain(cls: type, plain: dict[str, Any]) -> Any:
    known = _DEFAULTS[cls]
    unknown = next((name for name in plain if name not in known), None)
    if unknown is not None:
        raise StepLogError(f"these packages have no field {str(unknown)[:64]!r}")
    for name, value in plain.items():
        if name in _NESTED:
            plain[name] = _from_plain(_NESTED[name], value)
        elif name in _FROM_PLAIN:
            plain[name] = _FROM_PLAIN[name](value)
    return cls(**plain)
