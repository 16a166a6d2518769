"""Messages between the engine core and its shadow: a length, then msgpack."""

from __future__ import annotations

from typing import Any, BinaryIO, Final

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_step_log.errors import StepLogError
from llmstack_step_log.packing import unpack

MAX_MESSAGE_BYTES: Final = 1 << 28
MAX_REPORT_BYTES: Final = 1 << 16
_LENGTH_BYTES: Final = 4


def write_message(stream: BinaryIO, values: list[Any]) -> None:
    """Writes one message, and flushes.

    Raises:
        OSError: The other process does not read it.
    """
    packed = msgpack.packb(values)  # the packer of the step log belongs to another thread
    stream.write(len(packed).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(packed)
    stream.flush()


def read_message(stream: BinaryIO, max_bytes: int = MAX_MESSAGE_BYTES) -> list[Any] | None:
    """The next message; None at the end.

    Raises:
        StepLogError: It is none.
    """
    head = _read_whole(stream, _LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    if length > max_bytes:
        raise StepLogError(f"a message has {length} bytes")
    packed = _read_whole(stream, length)
    if len(packed) < length:
        return None
    found: list[Any] = unpack(packed, list)
    return found


def _read_whole(stream: BinaryIO, num_bytes: int) -> bytes:
    """So many bytes, or fewer at the end; a raw stream returns what there is."""
    parts = bytearray()
    while len(parts) < num_bytes and (part := stream.read(num_bytes - len(parts))):
        parts += part
    return bytes(parts)
