"""Sets of messages.

A message is one msgpack array of version, tag, epoch where the set has one, and fields.
Nothing in a message can execute or name code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_engine_core.messages.kinds import MAX_ITEMS, MAX_TEXT_LENGTH, CodecError, integer
from llmstack_engine_core.messages.rows import Row

MessageT = TypeVar("MessageT")
_LIMITS: Final[Mapping[str, Any]] = {
    "max_str_len": MAX_TEXT_LENGTH * 4,  # bytes of UTF-8
    "max_array_len": MAX_ITEMS,
    "max_map_len": 0,
    "max_ext_len": 0,
}


class _Packer(threading.local):
    """A packer for all messages of a thread: `msgpack.packb` makes one for each message."""

    def __init__(self) -> None:
        self.pack: Callable[[object], bytes] = msgpack.Packer(autoreset=True).pack


_packer: Final = _Packer()


class FrameTooLargeError(CodecError):
    """A message whose fields can be carried, but not in one frame."""


class MessageSet(Generic[MessageT]):
    """The messages of one direction, or of one protocol.

    Attributes:
        declared: Every set by its name, for fuzzers and tests.
        max_bytes: The largest frame.
        rows: Tag to the declaration of its message; numbers are never reused.
    """

    declared: ClassVar[dict[str, MessageSet[Any]]] = {}

    def __init__(
        self, name: str, version: int | str, max_bytes: int, rows: Mapping[int, Row], max_epoch: int = 0,
        max_values: int = 0,
    ) -> None:  # fmt: skip
        """Declares a set of messages that begin with `version`.

        `max_epoch` is 0 for messages without an epoch; `max_values` bounds the values in all lists of a message, which
        take 60 times their size in a frame, and is 0 for any.
        """
        self.max_bytes, self.rows = max_bytes, rows
        self._version, self._max_values = version, max_values
        self._epoch = integer(0, max_epoch) if max_epoch else None
        self._type_to_row = {row.cls: (tag, row.pack) for tag, row in rows.items()}
        self._tag_to_row = {tag: (row.unpack, f"the fields of {row.cls.__name__}") for tag, row in rows.items()}
        MessageSet.declared[name] = self

    def encode(self, message: MessageT, epoch: int = 0) -> bytes:
        """The bytes of one message.

        Raises:
            FrameTooLargeError: All of its fields together are too large.
            CodecError: A field is outside what the protocol can carry.
        """
        tag, pack_fields = self._type_to_row[type(message)]
        head = (self._version, tag) if self._epoch is None else (self._version, tag, epoch)
        try:
            frame = _packer.pack([*head, *pack_fields(message, "message")])
        except (TypeError, OverflowError, UnicodeEncodeError, ValueError) as error:
            if isinstance(error, CodecError):
                raise
            raise CodecError(f"a message of type {type(message).__name__} cannot be encoded: {error}") from error
        if len(frame) > self.max_bytes:
            raise FrameTooLargeError(f"a message of {len(frame)} bytes is too large; {self.max_bytes} is the limit")
        return frame

    def decode(self, frame: bytes, epoch: int | None = None) -> tuple[int, MessageT]:
        """The epoch of a message, 0 where there is none, and the message; only of this epoch where one is given.

        Raises:
            CodecError: The bytes are no message of this set, or one of another epoch.
        """
        if len(frame) > self.max_bytes:
            raise CodecError(f"a frame of {len(frame)} bytes is too large; {self.max_bytes} is the limit")
        hook = self._counting() if self._max_values else None
        try:
            values = msgpack.unpackb(frame, max_bin_len=self.max_bytes, list_hook=hook, **_LIMITS)
        except CodecError:
            raise
        # msgpack raises several kinds, all of these or subclasses; RecursionError for nesting in its pure-Python form.
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise CodecError(f"a frame of {len(frame)} bytes is not a message: {type(error).__name__}") from error
        head_length = 2 if self._epoch is None else 3
        if type(values) is not list or len(values) < head_length:
            raise CodecError("a message must be a list of version, tag and fields")
        version, tag = values[0], values[1]
        if type(version) is not type(self._version) or version != self._version:
            raise CodecError(f"the message has a protocol version other than {self._version}")
        if type(tag) is not int or tag not in self._tag_to_row:
            raise CodecError("the message has an unknown tag")
        found = 0 if self._epoch is None else self._epoch.unpack(values[2], "epoch")
        if epoch is not None and found != epoch:
            raise CodecError("the message is of another epoch: its sender was started at another time")
        unpack, name = self._tag_to_row[tag]
        return found, unpack(values[head_length:], name)

    def draw(self, pick: Random) -> MessageT:
        """Draws a message of any tag."""
        message: MessageT = pick.choice(list(self.rows.values())).draw(pick)
        return message

    def _counting(self) -> Callable[[list[object]], list[object]]:
        """A hook that counts the values in the lists of a message."""
        num_values = 0

        def count(values: list[object]) -> list[object]:
            nonlocal num_values
            num_values += len(values) + 1
            if num_values > self._max_values:
                raise CodecError(f"a message must hold at most {self._max_values} values")
            return values

        return count
