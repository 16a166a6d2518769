"""Messages from the engine core's rank to the others, and their answers.

Each is one msgpack array of version, epoch, tag and fields. The epoch is a random number of one start of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.request_codec import MAX_REQUEST_ID_LENGTH
from llmstack_engine_core.ipc.step_codec import decode_step, encode_step, pack_lists, unpack_lists
from llmstack_types import SchedulerOutput, TokenMasks

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 256 * 2**20

_pack: Final[Callable[[Any], bytes]] = msgpack.Packer(autoreset=True).pack
_LIMITS: Final[dict[str, Any]] = {
    "max_str_len": fields.MAX_TEXT_LENGTH * 4,
    "max_array_len": 65_536,
    "max_map_len": 0,
    "max_ext_len": 0,
    "max_bin_len": MAX_FRAME_BYTES,
}


class Call(IntEnum):
    """Methods of a model runner that all ranks are asked for at once; each rank answers."""

    LOAD_MODEL = 1
    AVAILABLE_KV_BYTES = 2
    INITIALIZE_KV_CACHE = 3
    SLEEP = 4
    WAKE_UP = 5
    END = 6


class AdapterCall(IntEnum):
    """An operation on a LoRA adapter in all ranks."""

    READ = 1
    """Begins to read it beside steps; there is no answer."""

    ADD = 2
    """Makes it available; each rank answers when it has read it."""

    REMOVE = 3
    """Drops it; there is no answer."""


class _Tag(IntEnum):
    CALL = 1
    STEP = 2
    MASKS = 3
    ADAPTER = 4
    MEET = 5
    BLOCKS = 6
    ANSWER = 16
    FAILURE = 17
    BLOCK_BYTES = 18


@dataclass(frozen=True, slots=True)
class CallMessage:
    """A method to call, with numbers as arguments."""

    call: Call
    arguments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepMessage:
    """One step.

    Attributes:
        number: Counts the steps of this epoch.
        has_masks: A `MasksMessage` follows for the ranks that sample.
        sampled: The tokens of the rows of earlier steps, in the order of the steps; for stages that do not sample.
    """

    number: int
    scheduled: SchedulerOutput
    has_masks: bool = False
    sampled: Sequence[Sequence[Sequence[int]]] = ()


@dataclass(frozen=True, slots=True)
class MasksMessage:
    """The masks of a step, sent when its forward pass is launched."""

    number: int
    masks: TokenMasks


@dataclass(frozen=True, slots=True)
class AdapterMessage:
    """A LoRA adapter by its identity; `path` is its folder, where it is to be read."""

    call: AdapterCall
    identity: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class BlocksMessage:
    """KV blocks to read, or to write.

    Attributes:
        block_ids: The blocks of the pool.
        first: Number of the first of these among those of the bytes.
        data: A part of the bytes; others have come before it. Empty where blocks are read.
        is_whole: It is the last part.
    """

    block_ids: tuple[int, ...]
    first: int = 0
    data: bytes = b""
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """A part of the bytes of blocks, which follow each other."""

    data: bytes


@dataclass(frozen=True, slots=True)
class MeetMessage:
    """Message with the addresses at which ranks of several nodes find each other.

    Attributes:
        link: Where a rank listens for the stage before. A rank sends its own, and gets that of the next stage.
        store: Where ranks of torch.distributed meet; empty where they do not.
    """

    link: str = ""
    store: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A call was successful; its numbers are the results."""

    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A call failed for a reason that the user can do something about."""

    reason: str
    numbers: tuple[int, ...] = field(default=(), init=False)


ToRank = CallMessage | StepMessage | MasksMessage | AdapterMessage | BlocksMessage | MeetMessage
Message = ToRank | Answer | Failure | BlockBytes


def encode(epoch: int, message: Message) -> bytes:
    """The bytes of one message.

    Raises:
        CodecError: A field is outside what the protocol can carry.
    """
    tag, encode_fields = _ENCODERS[type(message)]
    try:
        frame = _pack([VERSION, epoch, tag, *encode_fields(message)])
    except (TypeError, OverflowError, UnicodeEncodeError, ValueError) as error:
        raise CodecError(f"a message of type {type(message).__name__} cannot be encoded: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise CodecError(f"a message of {len(frame)} bytes is too large; {MAX_FRAME_BYTES} is the limit")
    return frame


def decode(epoch: int, frame: bytes) -> Message:
    """The inverse of `encode`.

    Raises:
        CodecError: The bytes are no message, or one of another epoch.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise CodecError(f"a frame of {len(frame)} bytes is too large; {MAX_FRAME_BYTES} is the limit")
    try:
        values = msgpack.unpackb(frame, **_LIMITS)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise CodecError(f"a frame of {len(frame)} bytes is not a message: {type(error).__name__}") from error
    if type(values) is not list or len(values) < 3 or values[0] != VERSION:
        raise CodecError(f"a message must be a list that begins with the version {VERSION}")
    if values[1] != epoch:
        raise CodecError("the message is of another epoch: its sender belongs to other ranks")
    decoder = _DECODERS.get(values[2]) if type(values[2]) is int else None
    if decoder is None:
        raise CodecError("the message has an unknown tag")
    num_fields, decode_fields = decoder
    if len(values) != num_fields + 3:
        raise CodecError(f"a message of tag {values[2]} must have {num_fields} fields, but has {len(values) - 3}")
    return decode_fields(values[3:])


def _encode_step(message: StepMessage) -> list[Any]:
    sampled = [pack_lists(list(rows), "sampled") for rows in message.sampled]
    return [message.number, message.has_masks, sampled, encode_step(message.scheduled)]


def _decode_step(values: list[Any]) -> StepMessage:
    number, has_masks, sampled, scheduled = values
    if type(sampled) is not list:
        raise CodecError("sampled must be a list")
    return StepMessage(
        _COUNT(number, "number"),
        decode_step(scheduled),
        fields.boolean(has_masks, "has_masks"),
        [unpack_lists(rows, "sampled") for rows in sampled],
    )


def _decode_masks(values: list[Any]) -> MasksMessage:
    number, request_ids, bits = values
    if type(bits) is not bytes:
        raise CodecError("bits must be bytes")
    masks = TokenMasks(_REQUEST_IDS(request_ids, "request_ids"), bytearray(bits))
    return MasksMessage(_COUNT(number, "number"), masks)


def _numbers(value: Any, name: str) -> tuple[int, ...]:
    if type(value) is not list:
        raise CodecError(f"{name} must be a list of numbers")
    fields.check_counters(value, name)
    return tuple(value)


def _decode_call(values: list[Any]) -> CallMessage:
    if type(values[0]) is not int or values[0] not in set(Call):
        raise CodecError("the message calls an unknown method")
    return CallMessage(Call(values[0]), _numbers(values[1], "arguments"))


def _decode_adapter(values: list[Any]) -> AdapterMessage:
    if type(values[0]) is not int or values[0] not in set(AdapterCall):
        raise CodecError("the message asks for something unknown of an adapter")
    return AdapterMessage(AdapterCall(values[0]), _IDENTITY(values[1], "identity"), _PATH(values[2], "path"))


def _bytes(value: Any, name: str) -> bytes:
    if type(value) is not bytes:
        raise CodecError(f"{name} must be bytes")
    return value


def _decode_blocks(values: list[Any]) -> BlocksMessage:
    block_ids, first, data, is_whole = values
    return BlocksMessage(
        _numbers(block_ids, "block_ids"),
        _COUNT(first, "first"),
        _bytes(data, "data"),
        fields.boolean(is_whole, "is_whole"),
    )


_COUNT = fields.integer()
_IDENTITY = fields.text(1024, 1)
_ADDRESS = fields.text(256)
_PATH = fields.text(4096)
_REASON = fields.text(4096)
_REQUEST_IDS = fields.texts(MAX_REQUEST_ID_LENGTH, min_length=1)

_ENCODERS: Final[Mapping[type, tuple[_Tag, Callable[[Any], list[Any]]]]] = {
    CallMessage: (_Tag.CALL, lambda message: [int(message.call), list(message.arguments)]),
    StepMessage: (_Tag.STEP, _encode_step),
    MasksMessage: (
        _Tag.MASKS,
        lambda message: [message.number, list(message.masks.request_ids), bytes(message.masks.bits)],
    ),
    AdapterMessage: (_Tag.ADAPTER, lambda message: [int(message.call), message.identity, message.path]),
    BlocksMessage: (
        _Tag.BLOCKS,
        lambda message: [list(message.block_ids), message.first, message.data, message.is_whole],
    ),
    BlockBytes: (_Tag.BLOCK_BYTES, lambda message: [message.data]),
    MeetMessage: (_Tag.MEET, lambda message: [message.link, message.store]),
    Answer: (_Tag.ANSWER, lambda message: [list(message.numbers)]),
    Failure: (_Tag.FAILURE, lambda message: [message.reason[:4096]]),
}
_DECODERS: Final[Mapping[int, tuple[int, Callable[[list[Any]], Message]]]] = {
    _Tag.CALL: (2, _decode_call),
    _Tag.STEP: (4, _decode_step),
    _Tag.MASKS: (3, _decode_masks),
    _Tag.ADAPTER: (3, _decode_adapter),
    _Tag.BLOCKS: (4, _decode_blocks),
    _Tag.BLOCK_BYTES: (1, lambda values: BlockBytes(_bytes(values[0], "data"))),
    _Tag.MEET: (2, lambda values: MeetMessage(_ADDRESS(values[0], "link"), _ADDRESS(values[1], "store"))),
    _Tag.ANSWER: (1, lambda values: Answer(_numbers(values[0], "numbers"))),
    _Tag.FAILURE: (1, lambda values: Failure(_REASON(values[0], "reason"))),
}
