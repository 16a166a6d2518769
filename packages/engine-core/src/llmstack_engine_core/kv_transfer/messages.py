"""Messages by which engine cores hand each other exports of KV blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from llmstack_engine_core.kv_transfer.tag import KVTransferError
from llmstack_engine_core.messages.kinds import CodecError, blob, shortened, text
from llmstack_engine_core.messages.message_set import MessageSet
from llmstack_engine_core.messages.rows import row

MAX_MESSAGE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for an export: its handle, what its tag must be, and its size."""

    handle: Annotated[str, text(256)]
    tag: Annotated[bytes, blob()]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an export: the NIXL agent that has it, the address in its process, a CRC-32, and its tag."""

    metadata: Annotated[bytes, blob()]
    address: int
    checksum: int
    tag: Annotated[bytes, blob()]


@dataclass(frozen=True, slots=True)
class Handed:
    """The descriptor of the memory follows, with the checksum of its bytes."""

    checksum: int


@dataclass(frozen=True, slots=True)
class Done:
    """An export has been read."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An export that this engine core cannot have; the reason is one sentence."""

    reason: Annotated[str, shortened(256)]


Message = Ask | Place | Handed | Done | Refused
MESSAGES: Final[MessageSet[Message]] = MessageSet(
    "kv_transfer",
    1,
    MAX_MESSAGE_BYTES,
    {1: row(Ask), 2: row(Place), 3: row(Handed), 4: row(Done), 5: row(Refused)},
)


def pack(message: Message) -> bytes:
    """The bytes of a message.

    Raises:
        KVTransferError: It cannot be sent.
    """
    try:
        return MESSAGES.encode(message)
    except CodecError as error:
        raise KVTransferError("a message cannot be sent") from error


def unpack(frame: bytes) -> Message:
    """The message of these bytes.

    Raises:
        KVTransferError: They are none.
    """
    try:
        return MESSAGES.decode(frame)[1]
    except CodecError as error:
        raise KVTransferError("a message cannot be read") from error
