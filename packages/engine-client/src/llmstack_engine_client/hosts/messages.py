"""Messages between the first machine and the others.

These run engine cores of its endpoint, or ranks of its model.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_engine_core.ipc.fields import CodecError, boolean, integer, text, texts, unpack_values
from llmstack_engine_core.ipc.frames import PROTOCOL_VERSION
from llmstack_engine_core.ipc.keys import KEY_LENGTH

# First in each message, and never changed, as `Answer` is: machines with other messages must still be able to say so.
_MAGIC: Final = "llmstack-hosts"
MAX_MESSAGE_BYTES: Final = 65_536
MAX_NUMBER: Final = 4096
MAX_TEXT_LENGTH: Final = 4096

Facts = tuple[tuple[str, str], ...]
"""Names and values of what must be equal on all machines, in the order in which they are compared."""


@dataclass(frozen=True, slots=True)
class Join:
    """The message by which a machine joins the first one.

    Attributes:
        host: The machine, for messages.
        number: That of its first engine core, or of the machine where it runs ranks.
        facts: What must be equal on all machines.
        addresses: Where its engine cores listen; empty for ranks, which it starts when the first machine says so.
        server_key: The public key by which the engine cores are known.
        generation: That of the engine cores, by `Start`; empty for those that began with the machine.
    """

    host: str
    number: int
    facts: Facts
    addresses: tuple[str, ...] = ()
    server_key: bytes = b""
    generation: str = ""

    @property
    def numbers(self) -> range:
        """The numbers of its engine cores, or the one of the machine."""
        return range(self.number, self.number + max(1, len(self.addresses)))


@dataclass(frozen=True, slots=True)
class Leave:
    """The machine ends on purpose, the first one or another."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A message of the first machine: the answer to a `Join`, or a later notice.

    Attributes:
        refusal: Why the machine is not welcome; empty where it is.
        is_final: Whether asking again is of no use.
    """

    refusal: str = ""
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class Start:
    """An order of the first machine: start engine cores, which join by a connection of their own, or ranks.

    Attributes:
        generation: What they are known by.
        name: The entry of `--reload-models` that says what the engine cores serve.
        ranks: Numbers of ranks, and where the first machine listens for each.
    """

    generation: str
    name: str = ""
    ranks: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a `Start` that cannot be followed, or whose engine cores or ranks have ended.

    Attributes:
        generation: That of the `Start`.
        reason: Why, in one line.
    """

    generation: str
    reason: str


Message = Join | Leave | Answer | Start | Failed


def own_version() -> str:
    """The release of this machine, and the version of the messages of engine cores."""
    try:
        release = version("llmstack-engine-core")
    except PackageNotFoundError:
        release = "unknown"
    return f"{release} (messages {PROTOCOL_VERSION})"


def own_name() -> str:
    """This machine, for messages: its name, and the process."""
    return f"{socket.gethostname()[:128] or 'a machine'} (process {os.getpid()})"


def pack(message: Message) -> bytes:
    """The bytes of a message; long texts are cut."""
    values = [value[:MAX_TEXT_LENGTH] if isinstance(value, str) else value for value in astuple(message)]
    packed: bytes = msgpack.packb([_MAGIC, _TAGS[type(message)], *values])
    return packed


def unpack(frame: bytes) -> Message:
    """The message of these bytes.

    Raises:
        CodecError: They are none.
    """
    match unpack_values(frame, MAX_MESSAGE_BYTES):
        case [magic, int(tag), *values] if magic == _MAGIC and tag in _DECLARED:
            message_class, checks = _DECLARED[tag]
            if len(values) == len(checks):
                names = [field.name for field in fields(message_class)]
                checked = [check(value, name) for check, value, name in zip(checks, values, names, strict=True)]
                message: Message = message_class(*checked)
                return message
    raise CodecError("the message is of another program, or of another version")


def _addresses(value: Any, name: str) -> tuple[str, ...]:
    return tuple(_ADDRESSES(value, name))


def _key(value: Any, name: str) -> bytes:
    if not isinstance(value, bytes) or len(value) not in (0, KEY_LENGTH):
        raise CodecError(f"{name} must be a public key")
    return value


def _pairs(
    first: Callable[[Any, str], Any], second: Callable[[Any, str], Any]
) -> Callable[[Any, str], tuple[tuple[Any, Any], ...]]:
    def check(value: Any, name: str) -> tuple[tuple[Any, Any], ...]:
        if type(value) is not list or not all(type(pair) is list and len(pair) == 2 for pair in value):
            raise CodecError(f"{name} must be a list of pairs")
        return tuple((first(one, name), second(other, name)) for one, other in value)

    return check


_LINE, _TEXT, _NUMBER = text(256), text(MAX_TEXT_LENGTH), integer(0, MAX_NUMBER)
_ADDRESSES = texts(256, max_items=MAX_NUMBER, min_length=1)
_DECLARED: dict[int, tuple[Any, Sequence[Callable[[Any, str], Any]]]] = {
    1: (Join, (_LINE, _NUMBER, _pairs(_LINE, _TEXT), _addresses, _key, _LINE)),
    2: (Leave, ()),
    3: (Answer, (_TEXT, boolean)),
    4: (Start, (_LINE, _LINE, _pairs(_NUMBER, _LINE))),
    5: (Failed, (_LINE, _TEXT)),
}
_TAGS = {message_class: tag for tag, (message_class, _) in _DECLARED.items()}
