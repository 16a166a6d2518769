"""The closed sets of messages between a client and an engine core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from llmstack_engine_core.messages.control import CALL, RESULT, ControlCall, ControlResult
from llmstack_engine_core.messages.kinds import Kind, blob, integer, items, number, optional, text, texts
from llmstack_engine_core.messages.media import MEDIA_SPEC
from llmstack_engine_core.messages.message_set import FrameTooLargeError, MessageSet
from llmstack_engine_core.messages.outputs import OUTPUTS
from llmstack_engine_core.messages.requests import MAX_REQUEST_ID_LENGTH, REQUEST, REQUEST_ID
from llmstack_engine_core.messages.rows import mapping, row, tuple_of
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, EngineReady

PROTOCOL_VERSION: Final = 16
# A request of a million tokens takes 4 MiB; prompt log-probabilities of a whole batch come in one message.
MAX_CLIENT_FRAME_BYTES: Final = 16 * 2**20
MAX_ENGINE_FRAME_BYTES: Final = 256 * 2**20
# Lists in a list take 60 times their size in a frame. The largest honest message of a client is one of aborts.
MAX_CLIENT_VALUES: Final = 131_072
_SEGMENT_KEY_BYTES: Final = 8
_LINE: Final = text(4096)
_SEGMENT_KEYS: Final = blob(_SEGMENT_KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Hello:
    """A client's first message; the answer is `EngineReady` or `StartFailed`."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A client's last message: its requests end."""


@dataclass(frozen=True, slots=True)
class FollowCache:
    """Asks for the content of the prefix cache: a whole `CacheUpdate`, then one for each change."""


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Ends requests of the sender."""

    request_ids: Annotated[tuple[str, ...], texts(MAX_REQUEST_ID_LENGTH, low=1, make=tuple)]


@dataclass(frozen=True, slots=True)
class MediaBytes:
    """The next bytes of the items of a request that follows, in the order of the items; from another machine."""

    request_id: Annotated[str, REQUEST_ID]
    data: Annotated[bytes, blob()]


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine core could not start; one line for the user."""

    reason: Annotated[str, _LINE]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine core is about to end; one line for the user."""

    reason: Annotated[str, _LINE]


ENGINE_STOPPED: Final = "the engine core has been stopped"
"""The reason of an `EngineFailed` that no crash explains: there will be no other engine core."""


@dataclass(frozen=True, slots=True)
class SleepChanged:
    """The engine core went to sleep at that level, or woke up: 0."""

    level: Annotated[int, integer(0, 2)]


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """Segments of prefixes that became findable or ceased to be.

    Attributes:
        number: One more than that of the engine core's update before.
        is_whole: Whether `added` is everything that is cached; else it is what came.
        added: The keys of `llmstack_kv_cache.segment_keys`, 8 bytes each.
        removed: The keys of those that went, before the others came.
    """

    number: int
    is_whole: bool
    added: Annotated[bytes, _SEGMENT_KEYS] = b""
    removed: Annotated[bytes, _SEGMENT_KEYS] = b""


_POSITIVE: Final = integer(1)
_NAME: Final = text(64)


def _named(values: Kind) -> Kind:
    return mapping(items(tuple_of(text(256, min_length=1), values), max_items=1024))


_READY: Final = row(
    EngineReady,
    dict.fromkeys(("num_blocks", "block_size", "max_model_len", "vocab_size"), _POSITIVE)
    | dict.fromkeys(("dtype", "device", "kv_cache_dtype", "numeric_contract_id"), _NAME)
    | {
        "phases_s": _named(number(0.0)), "backends": _named(text(1024)), "versions": _named(text(256)),
        "model_path": text(4096), "weights_name": text(256), "media": optional(MEDIA_SPEC),
    },
    absent=("engine_index",),  # a client's own
)  # fmt: skip

ClientMessage = Hello | Goodbye | FollowCache | MediaBytes | EngineCoreRequest | AbortRequests | ControlCall
EngineMessage = (
    EngineReady | StartFailed | EngineCoreOutputs | ControlResult | EngineFailed | SleepChanged | CacheUpdate
)

CLIENT_MESSAGES: Final[MessageSet[ClientMessage]] = MessageSet(
    "client",
    PROTOCOL_VERSION,
    MAX_CLIENT_FRAME_BYTES,
    {
        1: row(Hello),
        2: REQUEST,
        3: row(AbortRequests),
        4: CALL,
        5: row(Goodbye),
        6: row(FollowCache),
        7: row(MediaBytes),
    },
    max_values=MAX_CLIENT_VALUES,
)
# The epoch is a number of its own for each engine core that is started.
ENGINE_MESSAGES: Final[MessageSet[EngineMessage]] = MessageSet(
    "engine",
    PROTOCOL_VERSION,
    MAX_ENGINE_FRAME_BYTES,
    {
        16: _READY,
        17: row(StartFailed),
        18: OUTPUTS,
        19: RESULT,
        20: row(EngineFailed),
        21: row(SleepChanged),
        22: row(CacheUpdate),
    },
    max_epoch=2**32 - 1,
)


def encode_in_parts(message: EngineMessage, epoch: int = 0) -> list[bytes]:
    """The frames of a message of this epoch: one, or several for a step with many vectors.

    What belongs to no single request, such as statistics, goes with the first.

    Raises:
        FrameTooLargeError: The output of one request is too large.
        CodecError: A field is outside what the protocol can carry.
    """
    try:
        return [ENGINE_MESSAGES.encode(message, epoch)]
    except FrameTooLargeError:
        if not isinstance(message, EngineCoreOutputs) or len(message.outputs) < 2:
            raise
    half = len(message.outputs) // 2
    first = message._replace(outputs=message.outputs[:half])
    rest = EngineCoreOutputs(message.outputs[half:], message.timestamp_s, engine_index=message.engine_index)
    return [*encode_in_parts(first, epoch), *encode_in_parts(rest, epoch)]
