"""Encoding of messages: one msgpack array of version, tag and fields.

Between tag and fields, a message of an engine core has its epoch, a number of its own for each that is started.
Nothing in a message can execute or name code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.control_codec import (
    decode_control_call,
    decode_control_result,
    encode_control_call,
    encode_control_result,
)
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.frames import (
    PROTOCOL_VERSION,
    AbortRequests,
    CacheUpdate,
    ClientMessage,
    ControlCall,
    ControlResult,
    EngineFailed,
    EngineMessage,
    FollowCache,
    Goodbye,
    Hello,
    SleepChanged,
    StartFailed,
    Tag,
)
from llmstack_engine_core.ipc.outputs_codec import decode_outputs, encode_outputs
from llmstack_engine_core.ipc.request_codec import MAX_REQUEST_ID_LENGTH, decode_request, encode_request
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, EngineReady

# A request of a million tokens takes 4 MiB; prompt log-probabilities of a whole batch come in one message.
MAX_CLIENT_FRAME_BYTES: Final = 16 * 2**20
MAX_ENGINE_FRAME_BYTES: Final = 256 * 2**20

# One packer for all messages: `msgpack.packb` makes one for each.
_pack: Final[Callable[[Any], bytes]] = msgpack.Packer(autoreset=True).pack
_LIMITS: Final[dict[str, Any]] = {
    "max_str_len": fields.MAX_TEXT_LENGTH * 4,  # bytes of UTF-8
    "max_array_len": 65_536,
    "max_map_len": 0,
    "max_ext_len": 0,
}
# Lists in a list take 60 times their size in a frame. The largest honest message of a client is one of aborts.
MAX_CLIENT_VALUES: Final = 131_072


class FrameTooLargeError(CodecError):
    """A message whose fields can be carried, but not in one frame."""


def encode(message: ClientMessage | EngineMessage, epoch: int = 0) -> bytes:
    """The bytes of one message; `epoch` is that of an engine core's message.

    Raises:
        CodecError: A field is outside what the protocol can carry, or all of them together are too large.
    """
    tag, encode_fields, max_bytes = _ENCODERS[type(message)]
    try:
        header = (PROTOCOL_VERSION, tag, epoch) if tag >= Tag.READY else (PROTOCOL_VERSION, tag)
        frame = _pack([*header, *encode_fields(message)])
    except (TypeError, OverflowError, UnicodeEncodeError, ValueError) as error:
        raise CodecError(f"a message of type {type(message).__name__} cannot be encoded: {error}") from error
    if len(frame) > max_bytes:
        raise FrameTooLargeError(f"a message of {len(frame)} bytes is too large; {max_bytes} is the limit")
    return frame


def decode_client_message(frame: bytes) -> ClientMessage:
    """Decodes a message that a client may send.

    Raises:
        CodecError: The bytes are no message that a client may send.
    """
    num_values = 0

    def count(values: list[Any]) -> list[Any]:
        nonlocal num_values
        num_values += len(values) + 1
        if num_values > MAX_CLIENT_VALUES:
            raise CodecError(f"a message must hold at most {MAX_CLIENT_VALUES} values")
        return values

    message: ClientMessage = _decode(frame, _CLIENT_DECODERS, MAX_CLIENT_FRAME_BYTES, count)[1]
    return message


def decode_engine_message(frame: bytes) -> EngineMessage:
    """Decodes a message that an engine core may send.

    Raises:
        CodecError: The bytes are no message that an engine core may send.
    """
    return decode_engine_frame(frame)[1]


def decode_engine_frame(frame: bytes) -> tuple[int, EngineMessage]:
    """The epoch of the engine core, and its message; raises as `decode_engine_message`."""
    header, message = _decode(frame, _ENGINE_DECODERS, MAX_ENGINE_FRAME_BYTES, num_header_values=3)
    return _EPOCH(header[2], "epoch"), message


def _decode(
    frame: bytes,
    decoders: Mapping[int, tuple[int, Callable[[list[Any]], Any]]],
    max_bytes: int,
    list_hook: Callable[[list[Any]], list[Any]] | None = None,
    num_header_values: int = 2,
) -> tuple[list[Any], Any]:
    """The values before the fields, and the message."""
    if len(frame) > max_bytes:
        raise CodecError(f"a frame of {len(frame)} bytes is too large; {max_bytes} is the limit")
    try:
        values = msgpack.unpackb(frame, max_bin_len=max_bytes, list_hook=list_hook, **_LIMITS)
    except CodecError:
        raise
    # msgpack raises several kinds, all of these or subclasses; RecursionError for nesting in its pure-Python form.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise CodecError(f"a frame of {len(frame)} bytes is not a message: {type(error).__name__}") from error
    if type(values) is not list or len(values) < num_header_values:
        raise CodecError("a message must be a list of version, tag and fields")
    version, tag = values[0], values[1]
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise CodecError(f"the message has a protocol version other than {PROTOCOL_VERSION}")
    if type(tag) is not int or tag not in decoders:
        raise CodecError("the message has an unknown tag")
    num_fields, decode_fields = decoders[tag]
    header, values = values[:num_header_values], values[num_header_values:]
    if len(values) != num_fields:
        raise CodecError(f"a message of tag {tag} must have {num_fields} fields, but has {len(values)}")
    return header, decode_fields(values)


def _encode_ready(ready: EngineReady) -> list[Any]:
    scalars = [getattr(ready, name) for name in _READY_SCALARS]
    return [*scalars, *(_pairs(getattr(ready, name)) for name in _READY_MAPPINGS)]


def _encode_cache_update(update: CacheUpdate) -> list[Any]:
    return [update.number, update.is_whole, update.added, update.removed]


def _decode_cache_update(values: list[Any]) -> CacheUpdate:
    number, is_whole = fields.integer()(values[0], "number"), fields.boolean(values[1], "is_whole")
    return CacheUpdate(number, is_whole, _segment_keys(values[2], "added"), _segment_keys(values[3], "removed"))


def _segment_keys(value: Any, name: str) -> bytes:
    if type(value) is not bytes or len(value) % _SEGMENT_KEY_BYTES:
        raise CodecError(f"{name} must hold keys of {_SEGMENT_KEY_BYTES} bytes")
    return value


def _pairs(mapping: Mapping[str, Any]) -> list[list[Any]]:
    return [[key, value] for key, value in mapping.items()]


def _decode_ready(values: list[Any]) -> EngineReady:
    checks = {**_READY_SCALARS, **{name: _mapping(check) for name, check in _READY_MAPPINGS.items()}}
    return EngineReady(
        **{name: check(value, name) for (name, check), value in zip(checks.items(), values, strict=True)}
    )


def _mapping(check_value: fields.Check) -> fields.Check:
    check_key = fields.text(256, min_length=1)

    def check(value: Any, name: str) -> dict[str, Any]:
        if type(value) is not list or len(value) > 1024:
            raise CodecError(f"{name} must be a list of at most 1024 pairs")
        pairs = [fields.row(pair, name, 2) for pair in value]
        return {check_key(key, name): check_value(item, name) for key, item in pairs}

    return check


_SEGMENT_KEY_BYTES: Final = 8
_EPOCH = fields.integer(0, 2**32 - 1)
_POSITIVE = fields.integer(1)
_LINE = fields.text(4096)
_READY_SCALARS: Final[dict[str, fields.Check]] = {
    "num_blocks": _POSITIVE, "block_size": _POSITIVE, "max_model_len": _POSITIVE, "vocab_size": _POSITIVE,
    "dtype": fields.text(64), "device": fields.text(64), "kv_cache_bytes": fields.integer(), "pid": fields.integer(),
    "embedding_size": fields.integer(), "is_generative": fields.boolean, "is_causal": fields.boolean,
    "num_labels": fields.integer(), "model_path": fields.text(4096), "kv_cache_dtype": fields.text(64),
    "async_scheduling": fields.boolean, "num_kv_tokens": fields.integer(), "numeric_contract_id": fields.text(64),
    "prompt_embeds_size": fields.integer(), "weights_name": fields.text(256),
}  # fmt: skip
_READY_MAPPINGS: Final[dict[str, fields.Check]] = {
    "phases_s": fields.number(0.0), "backends": fields.text(1024), "versions": fields.text(256),
}  # fmt: skip
_SLEEP_LEVEL = fields.integer(0, 2)
_REQUEST_IDS = fields.texts(MAX_REQUEST_ID_LENGTH, min_length=1)


_ENCODERS: Final[dict[type, tuple[Tag, Callable[[Any], list[Any]], int]]] = {
    Hello: (Tag.HELLO, lambda _: [], MAX_CLIENT_FRAME_BYTES),
    Goodbye: (Tag.GOODBYE, lambda _: [], MAX_CLIENT_FRAME_BYTES),
    FollowCache: (Tag.FOLLOW_CACHE, lambda _: [], MAX_CLIENT_FRAME_BYTES),
    EngineCoreRequest: (Tag.ADD_REQUEST, encode_request, MAX_CLIENT_FRAME_BYTES),
    AbortRequests: (Tag.ABORT_REQUESTS, lambda message: [list(message.request_ids)], MAX_CLIENT_FRAME_BYTES),
    ControlCall: (Tag.CONTROL_CALL, encode_control_call, MAX_CLIENT_FRAME_BYTES),
    EngineReady: (Tag.READY, _encode_ready, MAX_ENGINE_FRAME_BYTES),
    StartFailed: (Tag.START_FAILED, lambda message: [message.reason], MAX_ENGINE_FRAME_BYTES),
    EngineCoreOutputs: (Tag.OUTPUTS, encode_outputs, MAX_ENGINE_FRAME_BYTES),
    ControlResult: (Tag.CONTROL_RESULT, encode_control_result, MAX_ENGINE_FRAME_BYTES),
    EngineFailed: (Tag.ENGINE_FAILED, lambda message: [message.reason], MAX_ENGINE_FRAME_BYTES),
    SleepChanged: (Tag.SLEEP_CHANGED, lambda message: [message.level], MAX_ENGINE_FRAME_BYTES),
    CacheUpdate: (Tag.CACHE_UPDATE, _encode_cache_update, MAX_ENGINE_FRAME_BYTES),
}

_CLIENT_DECODERS: Final[dict[int, tuple[int, Callable[[list[Any]], ClientMessage]]]] = {
    Tag.HELLO: (0, lambda _: Hello()),
    Tag.GOODBYE: (0, lambda _: Goodbye()),
    Tag.FOLLOW_CACHE: (0, lambda _: FollowCache()),
    Tag.ADD_REQUEST: (16, decode_request),
    Tag.ABORT_REQUESTS: (1, lambda values: AbortRequests(tuple(_REQUEST_IDS(values[0], "request_ids")))),
    Tag.CONTROL_CALL: (3, decode_control_call),
}

_ENGINE_DECODERS: Final[dict[int, tuple[int, Callable[[list[Any]], EngineMessage]]]] = {
    Tag.READY: (len(_READY_SCALARS) + len(_READY_MAPPINGS), _decode_ready),
    Tag.START_FAILED: (1, lambda values: StartFailed(_LINE(values[0], "reason"))),
    Tag.OUTPUTS: (17, decode_outputs),
    Tag.CONTROL_RESULT: (3, decode_control_result),
    Tag.ENGINE_FAILED: (1, lambda values: EngineFailed(_LINE(values[0], "reason"))),
    Tag.SLEEP_CHANGED: (1, lambda values: SleepChanged(_SLEEP_LEVEL(values[0], "level"))),
    Tag.CACHE_UPDATE: (4, _decode_cache_update),
}
