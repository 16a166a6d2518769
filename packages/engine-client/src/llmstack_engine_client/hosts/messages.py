"""Messages between the first machine and the others.

These run engine cores of its endpoint, or ranks of its model.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Final

from llmstack_engine_core.ipc.keys import KEY_LENGTH
from llmstack_engine_core.messages.kinds import CodecError, Kind, integer, items, shortened, text
from llmstack_engine_core.messages.message_set import MessageSet
from llmstack_engine_core.messages.protocol import PROTOCOL_VERSION
from llmstack_engine_core.messages.rows import row, tuple_of

# First in each message, and never changed, as `Answer` is: machines with other messages must still be able to say so.
_MAGIC: Final = "llmstack-hosts"
MAX_MESSAGE_BYTES: Final = 65_536
MAX_NUMBER: Final = 4096
MAX_TEXT_LENGTH: Final = 4096


def _key(value: object, name: str) -> bytes:
    if type(value) is not bytes or len(value) not in (0, KEY_LENGTH):
        raise CodecError(f"{name} must be a public key")
    return value


_LINE: Final = text(256)
_TEXT: Final = shortened(MAX_TEXT_LENGTH)
_NUMBER: Final = integer(0, MAX_NUMBER)
_ADDRESSES: Final = items(text(256, 1), MAX_NUMBER, tuple)
_FACTS: Final = items(tuple_of(_LINE, _TEXT), make=tuple)
_KEY: Final = Kind(_key, lambda pick: pick.randbytes(pick.choice((0, KEY_LENGTH))))
_RANKS: Final = items(tuple_of(_NUMBER, _LINE), make=tuple)

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

    host: Annotated[str, _LINE]
    number: Annotated[int, _NUMBER]
    facts: Annotated[Facts, _FACTS]
    addresses: Annotated[tuple[str, ...], _ADDRESSES] = ()
    server_key: Annotated[bytes, _KEY] = b""
    generation: Annotated[str, _LINE] = ""

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

    refusal: Annotated[str, _TEXT] = ""
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class Start:
    """An order of the first machine: start engine cores, which join by a connection of their own, or ranks.

    Attributes:
        generation: What they are known by.
        name: The entry of `--reload-models` that says what the engine cores serve.
        ranks: Numbers of ranks, and where the first machine listens for each.
    """

    generation: Annotated[str, _LINE]
    name: Annotated[str, _LINE] = ""
    ranks: Annotated[tuple[tuple[int, str], ...], _RANKS] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a `Start` that cannot be followed, or whose engine cores or ranks have ended.

    Attributes:
        generation: That of the `Start`.
        reason: Why, in one line.
    """

    generation: Annotated[str, _LINE]
    reason: Annotated[str, _TEXT]


Message = Join | Leave | Answer | Start | Failed

MESSAGES: Final[MessageSet[Message]] = MessageSet(
    "hosts",
    _MAGIC,
    MAX_MESSAGE_BYTES,
    {1: row(Join), 2: row(Leave), 3: row(Answer), 4: row(Start), 5: row(Failed)},
)


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
