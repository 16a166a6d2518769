"""Messages between the first machine and the others."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.frames import PROTOCOL_VERSION
from llmstack_engine_core.ipc.keys import KEY_LENGTH

# First in each message, and never changed: machines with other messages must still be able to say so.
_MAGIC: Final = "llmstack-hosts"
MAX_MESSAGE_BYTES: Final = 65_536
MAX_ENGINES: Final = 1024
MAX_REASON_LENGTH: Final = 1024
_JOIN, _LEAVE, _ANSWER, _LOAD, _LOAD_FAILED = 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Join:
    """The message by which a machine joins the first one.

    Attributes:
        version: Its release and its version of the messages of engine cores.
        size: The engine cores of all machines, by its options.
        start_rank: The number of the first of its engine cores.
        addresses: Where they listen.
        server_key: The public key by which they are known.
        host: The machine, for messages.
        generation: That of its engine cores, by `Load`; empty for those of the start.
    """

    version: str
    size: int
    start_rank: int
    addresses: tuple[str, ...]
    server_key: bytes
    host: str
    generation: str = ""

    @property
    def ranks(self) -> range:
        """The numbers of its engine cores."""
        return range(self.start_rank, self.start_rank + len(self.addresses))


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
class Load:
    """An order of the first machine: start further engine cores, which join by a connection of their own.

    Attributes:
        generation: What they are known by when they join.
        name: The entry of `--reload-models` that says what they serve.
    """

    generation: str
    name: str


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The answer to a `Load` that cannot be followed, or whose engine cores have ended.

    Attributes:
        generation: That of the `Load`.
        reason: Why, in one line.
    """

    generation: str
    reason: str


Message = Join | Leave | Answer | Load | LoadFailed


def own_version() -> str:
    """The release of this machine, and the version of the messages of engine cores."""
    try:
        release = version("llmstack-engine-core")
    except PackageNotFoundError:
        release = "unknown"
    return f"{release} (messages {PROTOCOL_VERSION})"


def pack(message: Message) -> bytes:
    """The bytes of a message."""
    values: list[Any]
    match message:
        case Join():
            values = [
                _JOIN, message.version, message.size, message.start_rank, list(message.addresses),
                message.server_key, message.host, message.generation,
            ]  # fmt: skip
        case Leave():
            values = [_LEAVE]
        case Answer():
            values = [_ANSWER, message.refusal, message.is_final]
        case Load():
            values = [_LOAD, message.generation, message.name]
        case LoadFailed():
            values = [_LOAD_FAILED, message.generation, message.reason[:MAX_REASON_LENGTH]]
    packed: bytes = msgpack.packb([_MAGIC, *values])
    return packed


def unpack(frame: bytes) -> Message:
    """The message of these bytes.

    Raises:
        CodecError: They are none.
    """
    match fields.unpack_values(frame, MAX_MESSAGE_BYTES):
        case [magic, tag, version_, size, start_rank, addresses, server_key, host, generation] if (magic, tag) == (
            _MAGIC,
            _JOIN,
        ):
            return Join(
                _TEXT(version_, "version"), _COUNT(size, "size"),
                _RANK(start_rank, "start_rank"), tuple(_ADDRESSES(addresses, "addresses")), _key(server_key),
                _TEXT(host, "host"), _TEXT(generation, "generation"),
            )  # fmt: skip
        case [magic, tag] if (magic, tag) == (_MAGIC, _LEAVE):
            return Leave()
        case [magic, tag, refusal, bool(is_final)] if (magic, tag) == (_MAGIC, _ANSWER):
            return Answer(_NAME(refusal, "refusal"), is_final)
        case [magic, tag, generation, name] if (magic, tag) == (_MAGIC, _LOAD):
            return Load(_TEXT(generation, "generation"), _TEXT(name, "name"))
        case [magic, tag, generation, reason] if (magic, tag) == (_MAGIC, _LOAD_FAILED):
            return LoadFailed(_TEXT(generation, "generation"), _NAME(reason, "reason"))
        case _:
            raise CodecError("the message is of another program, or of another version")


_TEXT = fields.text(256)
_NAME = fields.text(4096)
_COUNT = fields.integer(1, MAX_ENGINES)
_RANK = fields.integer(0, MAX_ENGINES)
_ADDRESSES = fields.texts(256, min_length=1)


def _key(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) not in (0, KEY_LENGTH):
        raise CodecError("server_key must be a public key")
    return value
