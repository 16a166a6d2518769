"""Messages between the engine core and its shadow.

Each follows its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, BinaryIO, Final

from llmstack_engine_core.messages.kinds import MAX_INT, CodecError, blob, integer, items, text
from llmstack_engine_core.messages.message_set import MessageSet
from llmstack_engine_core.messages.outputs import SHADOW
from llmstack_engine_core.messages.rows import row
from llmstack_types import ShadowReport

MAX_MESSAGE_BYTES: Final = 1 << 28
MAX_REPORT_BYTES: Final = 1 << 16
_LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to a shadow: the header of the step log, and the setting that the shadow changes."""

    header: Annotated[bytes, blob()]
    name: Annotated[str, text()]


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of the step log.

    Attributes:
        records: Its bytes.
        decisions: What the scheduler decided in it.
        start_us: The time of the last event before it.
        num_lost_steps: Steps before it that were left out.
    """

    records: Annotated[bytes, blob()]
    decisions: Annotated[list[bytes], items(blob())]
    start_us: Annotated[int, integer(-MAX_INT - 1)]
    num_lost_steps: int


Message = Begin | Segment | ShadowReport
MESSAGES: Final[MessageSet[Message]] = MessageSet(
    "shadow", 1, MAX_MESSAGE_BYTES, {1: row(Begin), 2: row(Segment), 3: SHADOW}
)


def write_message(stream: BinaryIO, message: Message) -> None:
    """Writes one message, and flushes.

    Raises:
        OSError: The other process does not read it.
        CodecError: A field is outside what the protocol can carry.
    """
    frame = MESSAGES.encode(message)
    stream.write(len(frame).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(frame)
    stream.flush()


def read_message(stream: BinaryIO, max_bytes: int = MAX_MESSAGE_BYTES) -> Message | None:
    """The next message; None at the end.

    Raises:
        CodecError: It is none, or too large.
    """
    head = _read_whole(stream, _LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    if length > max_bytes:
        raise CodecError(f"a message has {length} bytes")
    frame = _read_whole(stream, length)
    return MESSAGES.decode(frame)[1] if len(frame) == length else None


def _read_whole(stream: BinaryIO, num_bytes: int) -> bytes:
    """Reads so many bytes, or fewer at the end; a raw stream returns what there is."""
    parts = bytearray()
    while len(parts) < num_bytes and (part := stream.read(num_bytes - len(parts))):
        parts += part
    return bytes(parts)
