"""Messages between node 0 and the others, outside of steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_engine_core.hosts.messages import own_version as engine_version
from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_parallel.messages import VERSION

# First in each message, and never changed: nodes with other messages must still be able to say so.
_MAGIC: Final = "llmstack-ranks"
MAX_MESSAGE_BYTES: Final = 65_536
MAX_NODES: Final = 4096
MAX_EPOCH: Final = 2**62
_JOIN, _ORDERS, _NOTE = 1, 2, 3


class Kind(IntEnum):
    """The kind of a `Note`."""

    WAIT = 1
    """Node 0 knows of the node, and waits for others."""

    REFUSED = 2
    """The node is not welcome; the text says why."""

    ASK_AGAIN = 3
    """The node cannot join now; the text says why."""

    ALIVE = 4
    """A sign of life, which node 0 answers with the same."""

    OVER = 5
    """These ranks have ended, and others are about to start: join again."""

    END = 6
    """Node 0 ends for good."""

    LOST = 7
    """A rank of the node has ended; the text says how."""

    LEAVE = 8
    """The node ends on purpose."""


@dataclass(frozen=True, slots=True)
class Join:
    """The message by which a node joins node 0.

    Attributes:
        version: Its release and its versions of messages.
        node: Its number.
        host: The machine, for messages.
        facts: The facts that must be equal on all nodes, as names and values.
    """

    version: str
    node: int
    host: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Orders:
    """The ranks that a node starts.

    Attributes:
        epoch: Number of this start of all ranks.
        ranks: Numbers of ranks, and where node 0 listens for each.
    """

    epoch: int
    ranks: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Everything else; `epoch` is 0 where no ranks are meant."""

    kind: Kind
    epoch: int = 0
    text: str = ""


NodeMessage = Join | Orders | Note


def own_version() -> str:
    """The release of this node, and its versions of messages."""
    return f"{engine_version()}, rank messages {VERSION}"


def pack(message: NodeMessage) -> bytes:
    """The bytes of a message."""
    values: list[Any]
    match message:
        case Join():
            facts = [list(fact) for fact in message.facts]
            values = [_JOIN, message.version, message.node, message.host, facts]
        case Orders():
            values = [_ORDERS, message.epoch, [list(rank) for rank in message.ranks]]
        case Note():
            values = [_NOTE, int(message.kind), message.epoch, message.text[:4096]]
    packed: bytes = msgpack.packb([_MAGIC, *values])
    return packed


def unpack(frame: bytes) -> NodeMessage:
    """The message of these bytes.

    Raises:
        CodecError: They are none.
    """
    match fields.unpack_values(frame, MAX_MESSAGE_BYTES):
        case [magic, tag, version, node, host, [*facts]] if (magic, tag) == (_MAGIC, _JOIN):
            pairs = tuple(_fact(fact) for fact in facts)
            return Join(_LINE(version, "version"), _NODE(node, "node"), _LINE(host, "host"), pairs)
        case [magic, tag, epoch, [*ranks]] if (magic, tag) == (_MAGIC, _ORDERS):
            return Orders(_EPOCH(epoch, "epoch"), tuple(_rank(rank) for rank in ranks))
        case [magic, tag, kind, epoch, text] if (magic, tag) == (_MAGIC, _NOTE):
            if type(kind) is not int or kind not in set(Kind):
                raise CodecError("the message says something unknown")
            return Note(Kind(kind), _EPOCH(epoch, "epoch"), _TEXT(text, "text"))
        case _:
            raise CodecError("the message is of another program, or of another version")


def _fact(fact: object) -> tuple[str, str]:
    match fact:
        case [name, value]:
            return _LINE(name, "name"), _TEXT(value, "value")
        case _:
            raise CodecError("a fact must be a name and a value")


def _rank(order: object) -> tuple[int, str]:
    match order:
        case [rank, address]:
            return _NODE(rank, "rank"), _LINE(address, "address")
        case _:
            raise CodecError("an order must be a rank and an address")


_LINE = fields.text(256)
_TEXT = fields.text(4096)
_NODE = fields.integer(0, MAX_NODES)
_EPOCH = fields.integer(0, MAX_EPOCH)
