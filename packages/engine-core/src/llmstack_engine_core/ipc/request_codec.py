"""Encoding of `EngineCoreRequest`.

Token ids are packed; sampling parameters are one positional row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final, TypeVar

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.kv_transfer_codec import decode_kv_transfer, encode_kv_transfer
from llmstack_engine_core.ipc.structured_outputs_codec import decode_structured_outputs, encode_structured_outputs
from llmstack_types import (
    EngineCoreRequest,
    PoolingParams,
    PoolingTask,
    PoolingType,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    ThinkingTags,
)

_Member = TypeVar("_Member")
MAX_REQUEST_ID_LENGTH: Final = 512
MAX_STOP_STRINGS: Final = 1024
MAX_TENANT_LENGTH: Final = 128
MAX_LORA_NAME_LENGTH: Final = 1024
MAX_TIME_S: Final = 1e10  # three centuries; the log of steps counts microseconds
MAX_EOS_TOKEN_IDS: Final = 4096
MAX_BAD_WORD_SEQUENCES: Final = 4096
MAX_EXTRA_ARG_ITEMS: Final = 4096
MAX_PATTERN_SIZE: Final = 1024
MAX_LOGPROB_TOKEN_IDS: Final = 1024
MAX_TAG_TOKENS: Final = 64

_INT32 = 2**31 - 1
_REQUEST_ID = fields.text(MAX_REQUEST_ID_LENGTH, min_length=1)
_ARRIVAL_TIME = fields.number(-MAX_TIME_S, MAX_TIME_S)
_DEADLINE = fields.optional(_ARRIVAL_TIME)
_PRIORITY = fields.integer(-fields.MAX_INT - 1)
_SALT = fields.text(1024)
_LORA_NAME = fields.optional(fields.text(MAX_LORA_NAME_LENGTH))
_LORA_PATH = fields.text(4096)
_TENANT = fields.text(MAX_TENANT_LENGTH)
_FORK_OF = fields.text(MAX_REQUEST_ID_LENGTH)


def encode_request(request: EngineCoreRequest) -> list[Any]:
    """The fields of one request, in the order of its class."""
    return [
        request.request_id,
        fields.pack_uint32(request.prompt_token_ids, "prompt_token_ids"),
        encode_sampling_params(request.sampling_params),
        fields.pack_uint32(request.eos_token_ids, "eos_token_ids"),
        request.arrival_time_s,
        request.priority,
        request.cache_salt,
        request.lora_name,
        request.fork_of,
        None if request.pooling_params is None else encode_pooling_params(request.pooling_params),
        fields.pack_uint32(request.output_token_ids, "output_token_ids"),
        request.tenant,
        request.lora_path,
        request.deadline_s,
        None if request.kv_transfer is None else encode_kv_transfer(request.kv_transfer),
        request.prompt_embeds,
    ]


def decode_request(values: list[Any]) -> EngineCoreRequest:
    """The inverse of `encode_request`; an error names the request where its id could be read."""
    request_id = _REQUEST_ID(values[0], "request_id")
    try:
        prompt_token_ids = fields.unpack_uint32(values[1], "prompt_token_ids")
        if not prompt_token_ids:
            raise CodecError("prompt_token_ids must not be empty")
        return EngineCoreRequest(
            request_id,
            prompt_token_ids,
            decode_sampling_params(values[2]),
            _eos_token_ids(values[3]),
            _ARRIVAL_TIME(values[4], "arrival_time_s"),
            _PRIORITY(values[5], "priority"),
            _SALT(values[6], "cache_salt"),
            _LORA_NAME(values[7], "lora_name"),
            _FORK_OF(values[8], "fork_of"),
            decode_pooling_params(values[9]),
            tuple(fields.unpack_uint32(values[10], "output_token_ids")),
            _TENANT(values[11], "tenant"),
            _LORA_PATH(values[12], "lora_path"),
            _DEADLINE(values[13], "deadline_s"),
            decode_kv_transfer(values[14], "kv_transfer"),
            _prompt_embeds(values[15]),
        )
    except CodecError as error:
        raise CodecError(str(error), request_id) from error


def _prompt_embeds(value: Any) -> bytes | None:
    if value is not None and type(value) is not bytes:
        raise CodecError("prompt_embeds must be bytes")
    return value


def _eos_token_ids(value: Any) -> tuple[int, ...]:
    token_ids = tuple(fields.unpack_uint32(value, "eos_token_ids"))
    if len(token_ids) > MAX_EOS_TOKEN_IDS:
        raise CodecError(f"eos_token_ids must hold at most {MAX_EOS_TOKEN_IDS} ids")
    return token_ids


def _stop(value: Any, name: str) -> str | tuple[str, ...] | None:
    if value is None:
        return None
    return _STOP_STRING(value, name) if type(value) is str else tuple(_STOP_STRINGS(value, name))


def _token_ids(value: Any, name: str) -> tuple[int, ...] | None:
    return None if value is None else tuple(fields.unpack_uint32(value, name))


def _logit_bias(value: Any, name: str) -> dict[int, float] | None:
    if value is None:
        return None
    packed_ids, packed_biases = fields.row(value, name, 2)
    token_ids = fields.unpack_uint32(packed_ids, name)
    biases = fields.unpack_floats(packed_biases, name, len(token_ids))
    if biases and not (max(biases) <= _MAX_BIAS and min(biases) >= -_MAX_BIAS):
        raise CodecError(f"{name} must hold values in [-{_MAX_BIAS}, {_MAX_BIAS}]")
    return dict(zip(token_ids, biases, strict=True))


def _output_kind(value: Any, name: str) -> RequestOutputKind:
    kind = _OUTPUT_KINDS.get(value) if type(value) is str else None
    if kind is None:
        raise CodecError(f"{name} must be one of {', '.join(_OUTPUT_KINDS)}")
    return kind


def _texts(value: Any, name: str) -> tuple[str, ...]:
    return tuple(_STOP_STRINGS(value, name))


def _sequences(value: Any, name: str) -> tuple[tuple[int, ...], ...]:
    """Lengths, then the ids of all sequences in one piece."""
    packed_lengths, packed_ids = fields.row(value, name, 2)
    lengths = fields.unpack_uint32(packed_lengths, name)
    if len(lengths) > MAX_BAD_WORD_SEQUENCES:
        raise CodecError(f"{name} must hold at most {MAX_BAD_WORD_SEQUENCES} sequences")
    token_ids = iter(fields.unpack_uint32(packed_ids, name, sum(lengths)))
    return tuple(tuple(itertools.islice(token_ids, length)) for length in lengths)


def _extra_args(value: Any, name: str) -> dict[str, Any]:
    """Decodes [name, value] pairs: messages hold no maps."""
    if type(value) is not list:
        raise CodecError(f"{name} must be a list of pairs")
    pairs = [fields.row(pair, name, 2) for pair in value]
    num_items = 0
    for key, entry in pairs:
        items = entry if type(entry) is list else [entry]
        num_items += len(items)
        if type(key) is not str or num_items > MAX_EXTRA_ARG_ITEMS or not all(map(_is_scalar, items)):
            raise CodecError(f"{name} must hold names with scalars or lists of scalars")
    return dict(pairs)


def _is_scalar(item: Any) -> bool:
    """JSON's scalars, with integers of 64 bits; msgpack has larger ones, and numbers that are not finite."""
    if type(item) is int:
        return -fields.MAX_INT - 1 <= item <= fields.MAX_INT
    return type(item) in _SCALARS and (type(item) is not float or math.isfinite(item))


def _early_stopping(value: Any, name: str) -> bool | str:
    if type(value) is not bool and value != "never":
        raise CodecError(f"{name} must be a boolean or 'never'")
    return value  # type: ignore[no-any-return]  # one of the three values


def _repetition_detection(value: Any, name: str) -> RepetitionDetectionParams | None:
    """Decodes the longest pattern, the shortest one and the number of times."""
    if value is None:
        return None
    longest, shortest, count = (_PATTERN_SIZE(item, name) for item in fields.row(value, name, 3))
    return RepetitionDetectionParams(longest, shortest, count)


def _logprob_token_ids(value: Any, name: str) -> tuple[int, ...] | None:
    return None if value is None else _few_token_ids(value, name, MAX_LOGPROB_TOKEN_IDS)


def _thinking_tags(value: Any, name: str) -> ThinkingTags:
    """Decodes the tokens that begin reasoning, those that end it, and whether it has begun."""
    start, end, is_open = fields.row(value, name, 3)
    end_token_ids = _few_token_ids(end, name, MAX_TAG_TOKENS)
    if not end_token_ids:
        raise CodecError(f"{name} must say what ends reasoning")
    return ThinkingTags(_few_token_ids(start, name, MAX_TAG_TOKENS), end_token_ids, fields.boolean(is_open, name))


def _few_token_ids(value: Any, name: str, max_length: int) -> tuple[int, ...]:
    token_ids = tuple(fields.unpack_uint32(value, name))
    if len(token_ids) > max_length:
        raise CodecError(f"{name} must hold at most {max_length} ids")
    return token_ids


_MAX_BIAS = 1e6
_MAX_PENALTY = 100.0
_TINY = 5e-324  # above 0
_SCALARS: Final = {str, bool, float, type(None)}
_OUTPUT_KINDS: Final = {kind.value: kind for kind in RequestOutputKind}
_POOLING_TYPES: Final = {kind.value: kind for kind in PoolingType}
# At admission, `score` becomes `classify`.
_POOLING_TASKS: Final = {task.value: task for task in PoolingTask if task is not PoolingTask.SCORE}
_DIMENSIONS = fields.optional(fields.integer(1, _INT32))
_SECOND_TEXT_START = fields.optional(fields.integer(0, _INT32))
_STOP_STRING = fields.text()
_STOP_STRINGS = fields.texts(max_items=MAX_STOP_STRINGS)
_COUNT = fields.integer(0, _INT32)
_PATTERN_SIZE = fields.integer(0, MAX_PATTERN_SIZE)
_OPTIONAL_COUNT = fields.optional(_COUNT)
_NUM_LOGPROBS = fields.optional(fields.integer(0, _INT32))

# One check per field of `SamplingParams`, in the order of its class: the wire carries no names. The last fields of the
# class are missing: the front end alone heeds them.
_SAMPLING_CHECKS: Final[dict[str, fields.Check]] = {
    "n": fields.integer(1, _INT32),
    "presence_penalty": fields.number(-_MAX_PENALTY, _MAX_PENALTY),
    "frequency_penalty": fields.number(-_MAX_PENALTY, _MAX_PENALTY),
    "repetition_penalty": fields.number(0.01, 100.0),
    "temperature": fields.number(0.0, 1000.0),
    "top_p": fields.number(_TINY, 1.0),
    "top_k": fields.integer(-1, fields.MAX_INT),
    "min_p": fields.number(0.0, 1.0),
    "seed": fields.optional(fields.integer(-fields.MAX_INT - 1)),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": fields.boolean,
    "max_tokens": _OPTIONAL_COUNT,
    "min_tokens": _COUNT,
    "logprobs": _NUM_LOGPROBS,
    "prompt_logprobs": _NUM_LOGPROBS,
    "detokenize": fields.boolean,
    "skip_special_tokens": fields.boolean,
    "spaces_between_special_tokens": fields.boolean,
    "include_stop_str_in_output": fields.boolean,
    "output_kind": _output_kind,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _token_ids,
    "best_of": fields.optional(fields.integer(1, _INT32)),
    "use_beam_search": fields.boolean,
    "length_penalty": fields.number(-10.0, 10.0),
    "early_stopping": _early_stopping,
    "typical_p": fields.number(_TINY, 1.0),
    "bad_words": fields.optional(_texts),
    "bad_words_token_ids": _sequences,
    "extra_args": fields.optional(_extra_args),
    "structured_outputs": fields.optional(decode_structured_outputs),
    "kept_special_tokens": _texts,
    "repetition_detection": _repetition_detection,
    "logprob_token_ids": _logprob_token_ids,
    "thinking_token_budget": _OPTIONAL_COUNT,
    "thinking_tags": fields.optional(_thinking_tags),
    "no_repeat_ngram_size": _PATTERN_SIZE,
}
_NAMES: Final = tuple(_SAMPLING_CHECKS)
_CHECKS: Final = tuple(_SAMPLING_CHECKS.values())
_GET_FIELDS: Final = attrgetter(*_NAMES)
_STOP_TOKEN_IDS: Final = _NAMES.index("stop_token_ids")
_LOGIT_BIAS: Final = _NAMES.index("logit_bias")
_ALLOWED_TOKEN_IDS: Final = _NAMES.index("allowed_token_ids")
_BAD_WORDS_TOKEN_IDS: Final = _NAMES.index("bad_words_token_ids")
_EXTRA_ARGS: Final = _NAMES.index("extra_args")
_STRUCTURED_OUTPUTS: Final = _NAMES.index("structured_outputs")
_REPETITION_DETECTION: Final = _NAMES.index("repetition_detection")
_LOGPROB_TOKEN_IDS: Final = _NAMES.index("logprob_token_ids")
_THINKING_TAGS: Final = _NAMES.index("thinking_tags")


def encode_sampling_params(params: SamplingParams) -> list[Any]:
    """The fields that an engine core heeds, in the order of the class."""
    values = list(_GET_FIELDS(params))
    for index in (_STOP_TOKEN_IDS, _ALLOWED_TOKEN_IDS, _LOGPROB_TOKEN_IDS):
        if values[index] is not None:
            values[index] = fields.pack_uint32(values[index], _NAMES[index])
    sequences = params.bad_words_token_ids
    values[_BAD_WORDS_TOKEN_IDS] = [
        fields.pack_uint32(map(len, sequences), "bad_words_token_ids"),
        fields.pack_uint32(itertools.chain.from_iterable(sequences), "bad_words_token_ids"),
    ]
    if params.extra_args is not None:
        values[_EXTRA_ARGS] = [[key, value] for key, value in params.extra_args.items()]
    if params.structured_outputs is not None:
        values[_STRUCTURED_OUTPUTS] = encode_structured_outputs(params.structured_outputs)
    detection = params.repetition_detection
    if detection is not None:
        values[_REPETITION_DETECTION] = [detection.max_pattern_size, detection.min_pattern_size, detection.min_count]
    tags = params.thinking_tags
    if tags is not None:
        ids = [fields.pack_uint32(one, "thinking_tags") for one in (tags.start_token_ids, tags.end_token_ids)]
        values[_THINKING_TAGS] = [*ids, tags.is_open]
    bias = params.logit_bias
    if bias is not None:
        packed_ids = fields.pack_uint32(bias.keys(), "logit_bias")
        values[_LOGIT_BIAS] = [packed_ids, fields.pack_floats(bias.values(), "logit_bias")]
    return values


def encode_pooling_params(params: PoolingParams) -> list[Any]:
    """Without what admission has done already: nothing is left to cut."""
    return [
        params.pooling_type, params.normalize, params.dimensions, params.task, params.use_activation,
        params.second_text_start,
    ]  # fmt: skip


def decode_pooling_params(value: Any) -> PoolingParams | None:
    """The inverse of `encode_pooling_params`, and None."""
    if value is None:
        return None
    pooling_type, normalize, dimensions, task, use_activation, start = fields.row(value, "pooling_params", 6)
    task = _member(_POOLING_TASKS, task, "task")
    is_whole = task.is_per_token and pooling_type is None
    return PoolingParams(
        None if is_whole else _member(_POOLING_TYPES, pooling_type, "pooling_type"),
        fields.boolean(normalize, "normalize"),
        _DIMENSIONS(dimensions, "dimensions"),
        task,
        fields.boolean(use_activation, "use_activation"),
        second_text_start=_SECOND_TEXT_START(start, "second_text_start"),
    )


def _member(members: Mapping[str, _Member], value: Any, name: str) -> _Member:
    if type(value) is not str or value not in members:
        raise CodecError(f"{name} must be one of {', '.join(members)}")
    return members[value]


def decode_sampling_params(value: Any) -> SamplingParams:
    """The inverse of `encode_sampling_params`."""
    values = fields.row(value, "sampling_params", len(_NAMES))
    return SamplingParams(*[check(item, name) for check, item, name in zip(_CHECKS, values, _NAMES, strict=True)])
