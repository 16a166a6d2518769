"""Declaration of `EngineCoreRequest` and of what is in it. Token ids are packed."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from random import Random
from typing import Any, Final

from llmstack_engine_core.messages import kinds
from llmstack_engine_core.messages.kinds import BOOLEAN, FLOATS, MAX_INT, UINT32S, CodecError, Kind, optional
from llmstack_engine_core.messages.media import MEDIA
from llmstack_engine_core.messages.rows import mapping, row
from llmstack_types import (
    EngineCoreRequest,
    KVTransferParams,
    PoolingParams,
    PoolingTask,
    PoolingType,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    ThinkingTags,
)
from llmstack_types.engine_core import TokenIds
from llmstack_types.field_facts import facts_of
from llmstack_types.sampling_params import MAX_PATTERN_SIZE

MAX_REQUEST_ID_LENGTH: Final = 512
MAX_TENANT_LENGTH: Final = 128
MAX_LORA_NAME_LENGTH: Final = 1024
MAX_SESSION_LENGTH: Final = 256
MAX_TIME_S: Final = 1e10  # three centuries; the log of steps counts microseconds
MAX_EXTRA_ARG_ITEMS: Final = 4096
MAX_BIAS: Final = 1e6
_PIECE_TOKENS: Final = 16_384
_PAUSE_S: Final = 50e-6  # a pause of 0 gives the interpreter to no other thread
_INT32: Final = 2**31 - 1
_SCALARS: Final = {str, bool, float, type(None)}


def _unpack_biases(value: object, name: str, length: int | None = None) -> list[float]:
    biases: list[float] = FLOATS.unpack(value, name, length)
    if biases and not (max(biases) <= MAX_BIAS and min(biases) >= -MAX_BIAS):
        raise CodecError(f"{name} must hold values in [-{MAX_BIAS}, {MAX_BIAS}]")
    return biases


def _unpack_arguments(value: object, name: str) -> dict[str, object]:
    found: dict[str, object] = {}
    num_items = 0
    for key, entry in (kinds.list_of(pair, name, 2) for pair in kinds.list_of(value, name)):
        items = entry if type(entry) is list else [entry]
        num_items += len(items)
        if type(key) is not str or num_items > MAX_EXTRA_ARG_ITEMS or not all(map(_is_scalar, items)):
            raise CodecError(f"{name} must hold names with scalars or lists of scalars")
        found[key] = entry
    return found


def _is_scalar(item: object) -> bool:
    """JSON's scalars, with integers of 64 bits; msgpack has larger ones, and numbers that are not finite."""
    if type(item) is int:
        return -MAX_INT - 1 <= item <= MAX_INT
    return type(item) in _SCALARS and (type(item) is not float or math.isfinite(item))


def _draw_arguments(pick: Random) -> dict[str, Any]:
    return {name: pick.choice((None, True, MAX_INT, 0.5, "a", [1, "b", None])) for name in pick.sample("abc", 2)}


def _never(value: object, name: str) -> str:
    if value != "never":
        raise CodecError(f"{name} must be a boolean or 'never'")
    return "never"


REQUEST_ID: Final = kinds.text(MAX_REQUEST_ID_LENGTH, min_length=1)
LORA_NAME: Final = optional(kinds.text(MAX_LORA_NAME_LENGTH))
SESSION: Final = kinds.text(MAX_SESSION_LENGTH)
TENANT: Final = kinds.text(MAX_TENANT_LENGTH)
TOKEN_IDS: Final = kinds.uint32s(make=tuple)
_TIME: Final = kinds.number(-MAX_TIME_S, MAX_TIME_S)
_COUNT: Final = kinds.integer(0, _INT32)
_PATTERN_SIZE: Final = kinds.integer(0, MAX_PATTERN_SIZE)
_BIASES: Final = replace(FLOATS, unpack=_unpack_biases)
_STRINGS: Final = kinds.texts(max_items=1024, make=tuple)
_OPTIONAL_COUNT: Final = optional(_COUNT)
_OPTIONAL_TEXT: Final = optional(kinds.text())
_SCHEMA: Final = optional(replace(kinds.text(), pack=kinds.text().unpack))  # a text since admission

_CHOICES: Final = optional(kinds.texts(max_items=4096, make=tuple))
_STRUCTURED_OUTPUTS: Final = row(
    StructuredOutputsParams,
    {
        "json": _SCHEMA, "regex": _OPTIONAL_TEXT, "choice": _CHOICES, "grammar": _OPTIONAL_TEXT,
        "json_object": optional(BOOLEAN), "structural_tag": _SCHEMA, "whitespace_pattern": _OPTIONAL_TEXT,
        "disable_additional_properties": optional(BOOLEAN),
    },
    prefix="structured_outputs.",
)  # fmt: skip

SAMPLING_PARAMS: Final = row(
    SamplingParams,
    {
        "stop": optional(kinds.either(kinds.text(), _STRINGS)),
        "stop_token_ids": optional(TOKEN_IDS),
        "logprobs": _OPTIONAL_COUNT,
        "prompt_logprobs": _OPTIONAL_COUNT,
        "output_kind": kinds.member(RequestOutputKind),
        "logit_bias": optional(mapping(kinds.columns(tuple, {"token_id": UINT32S, "logit_bias": _BIASES}))),
        "allowed_token_ids": optional(TOKEN_IDS),
        "early_stopping": kinds.either(BOOLEAN, Kind(_never, lambda pick: "never")),
        "bad_words": optional(_STRINGS),
        "bad_words_token_ids": kinds.lists(UINT32S, 4096, tuple, tuple),
        "extra_args": optional(
            Kind(_unpack_arguments, _draw_arguments, lambda value, name: [[*pair] for pair in value.items()])
        ),
        "structured_outputs": optional(_STRUCTURED_OUTPUTS),
        "kept_special_tokens": _STRINGS,
        "repetition_detection": optional(
            row(
                RepetitionDetectionParams,
                dict.fromkeys(("max_pattern_size", "min_pattern_size", "min_count"), _PATTERN_SIZE),
                prefix="repetition_detection.",
            )
        ),
        "logprob_token_ids": optional(kinds.uint32s(1024, make=tuple)),
        "thinking_tags": optional(
            row(
                ThinkingTags,
                {"start_token_ids": kinds.uint32s(64, make=tuple), "end_token_ids": kinds.uint32s(64, 1, tuple)},
                prefix="thinking_tags.",
            )
        ),
    },
    absent=[name for name, facts in facts_of(SamplingParams).items() if not facts.is_sent],
)


def _check_pooling(params: PoolingParams) -> None:
    if params.pooling_type is None and not (params.task and params.task.is_per_token):
        raise CodecError(f"pooling_type must be one of {', '.join(PoolingType)}")


POOLING_PARAMS: Final = row(
    PoolingParams,
    {
        "pooling_type": optional(kinds.member(PoolingType)),
        "normalize": BOOLEAN,
        "dimensions": optional(kinds.integer(1, _INT32)),
        # At admission, `score` becomes `classify`.
        "task": kinds.member(task for task in PoolingTask if task is not PoolingTask.SCORE),
        "use_activation": BOOLEAN,
        "second_text_start": _OPTIONAL_COUNT,
    },
    absent=("truncate_prompt_tokens", "truncation_side"),  # admission has done it: nothing is left to cut
    check=_check_pooling,
)

KV_TRANSFER: Final = row(
    KVTransferParams, {"remote_engine_id": kinds.text(128), "transfer_id": kinds.text(128), "num_tokens": _COUNT},
    prefix="kv_transfer.",
)  # fmt: skip

_PROMPT: Final = kinds.uint32s(min_items=1)


def _unpack_prompt(value: object, name: str) -> list[int]:
    """The ids with the largest of them, which all later checks want.

    In pieces between which other threads may run: half a million ids take more than ten milliseconds.
    """
    if type(value) is not bytes or not value or len(value) % 4:
        refused: list[int] = _PROMPT.unpack(value, name)
        return refused
    found, numbers = TokenIds(), memoryview(value).cast("I")
    for start in range(0, len(numbers), _PIECE_TOKENS):
        if start:
            time.sleep(_PAUSE_S)
        piece = numbers[start : start + _PIECE_TOKENS].tolist()
        found.extend(piece)
        found.largest = max(found.largest, max(piece))
    return found


REQUEST: Final = row(
    EngineCoreRequest,
    {
        "request_id": REQUEST_ID,
        "prompt_token_ids": replace(_PROMPT, unpack=_unpack_prompt),
        "sampling_params": SAMPLING_PARAMS,
        "eos_token_ids": kinds.uint32s(4096, make=tuple),
        "arrival_time_s": _TIME,
        "priority": kinds.integer(-MAX_INT - 1),
        "cache_salt": kinds.text(1024),
        "lora_name": LORA_NAME,
        "fork_of": kinds.text(MAX_REQUEST_ID_LENGTH),
        "pooling_params": optional(POOLING_PARAMS),
        "output_token_ids": TOKEN_IDS,
        "tenant": TENANT,
        "lora_path": kinds.text(4096),
        "deadline_s": optional(_TIME),
        "kv_transfer": optional(KV_TRANSFER),
        "media": MEDIA,
        "session": SESSION,
    },
    absent=("disk_miss",),  # the engine core's own
    has_key=True,
)
