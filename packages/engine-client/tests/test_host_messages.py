"""Messages between machines: what is unpacked as it was packed, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest

from llmstack_engine_client.hosts.messages import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT_LENGTH,
    MESSAGES,
    Answer,
    Failed,
    Join,
    Leave,
    Message,
    Start,
)
from llmstack_engine_core.messages.kinds import CodecError

ADDRESS = "tcp://127.0.0.1:1"
EXAMPLES: list[Message] = [
    Join("a", 2, (("version", "1"), ("dtype", "")), (ADDRESS, ADDRESS), b"k" * 40, "b:1"),
    Join("a", 0, ()),
    Leave(),
    Answer(),
    Answer("no", is_final=False),
    Start("b:1", "next"),
    Start("7", ranks=((1, ADDRESS), (4096, ""))),
    Failed("7", "it ended"),
]
JOIN = ["llmstack-hosts", 1, "a", 2, [["version", "1"]], [ADDRESS], b"k" * 40, ""]


@pytest.mark.parametrize("message", EXAMPLES, ids=str)
def test_each_message_is_unpacked_as_it_was_packed(message: Message) -> None:
    assert MESSAGES.decode(MESSAGES.encode(message))[1] == message


def test_long_texts_are_cut_to_what_the_other_side_takes() -> None:
    assert MESSAGES.decode(MESSAGES.encode(Failed("7", "x" * 9999)))[1] == Failed("7", "x" * MAX_TEXT_LENGTH)


def changed(place: int, value: object) -> list[Any]:
    return [*JOIN[:place], value, *JOIN[place + 1 :]]


@pytest.mark.parametrize(
    "values",
    [
        *[changed(place, None) for place in range(len(JOIN))],
        changed(0, "llmstack-ranks"),
        changed(1, 9),
        changed(1, "1"),
        changed(1, [1]),
        JOIN[:-1],
        [*JOIN, 1],
        changed(2, "x" * 257),
        changed(3, -1),
        changed(3, 4097),
        changed(3, True),
        changed(4, [["version"]]),
        changed(4, [["version", 1]]),
        changed(4, ["ab"]),
        changed(4, [["x" * 257, ""]]),
        changed(4, [["x", "y" * 4097]]),
        changed(5, [""]),
        changed(5, [1]),
        changed(6, b"k" * 39),
        changed(6, "k" * 40),
        ["llmstack-hosts", 2, 1],
        ["llmstack-hosts", 3, "no", 1],
        ["llmstack-hosts", 3, "x" * 4097, True],
        ["llmstack-hosts", 4, "7", "", [[-1, ADDRESS]]],
        ["llmstack-hosts", 4, "7", "", [[1, ADDRESS, 1]]],
        ["llmstack-hosts", 5, "7", 1],
        [],
        "llmstack-hosts",
    ],
    ids=str,
)
def test_what_is_no_message_is_refused(values: object) -> None:
    assert isinstance(MESSAGES.decode(msgpack.packb(JOIN))[1], Join)
    with pytest.raises(CodecError):
        MESSAGES.decode(msgpack.packb(values))[1]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91" * 60_000,
        bytes(MAX_MESSAGE_BYTES + 1),
        b"\xdd\xff\xff\xff\xff",
        MESSAGES.encode(Leave()) + b"x",
    ],
    ids=["empty", "unused", "deep", "large", "long list", "more than one"],
)
def test_bytes_that_are_no_message_are_refused(frame: bytes) -> None:
    with pytest.raises(CodecError):
        MESSAGES.decode(frame)[1]


def test_cut_and_changed_bytes_are_a_message_or_refused() -> None:
    draw, num_refused = random.Random(7), 0
    for _ in range(5_000):
        frame = bytearray(MESSAGES.encode(draw.choice(EXAMPLES)))
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(frame) + 1)
            frame[place : place + draw.randrange(4)] = draw.randbytes(draw.randrange(4))
        try:
            message = MESSAGES.decode(bytes(frame))[1]
        except CodecError:
            num_refused += 1
            continue
        assert MESSAGES.decode(MESSAGES.encode(message))[1] == message
    assert 0 < num_refused < 5_000
