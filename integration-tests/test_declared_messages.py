"""Every declared message arrives as it was sent, and no bytes in its place are more than a `CodecError`."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest

from llmstack_engine_client.hosts.messages import MESSAGES as HOST_MESSAGES
from llmstack_engine_core.kv_transfer.messages import MESSAGES as KV_MESSAGES
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.message_set import MessageSet
from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES, ENGINE_MESSAGES
from llmstack_insight.shadow.wire import MESSAGES as SHADOW_MESSAGES
from llmstack_parallel.messages import MESSAGES as RANK_MESSAGES

ROOT = Path(__file__).resolve().parent.parent
EPOCH = 7
JUNK = (
    None, True, -1, 0, 1, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "", "never", "x" * 600, b"",
    b"abc", bytes(8), b"\xff" * 12, [], [[]], [[], []], [1, "a"], [None] * 70, {}, {"a": 1}, msgpack.ExtType(4, b"x"),
)  # fmt: skip
EACH = [
    pytest.param(messages, tag, id=f"{name}-{row.cls.__name__}")
    for name, messages in sorted(MessageSet.declared.items())
    for tag, row in messages.rows.items()
]


def test_the_fuzzer_of_frames_has_every_declared_set() -> None:
    sources = [path.read_text() for path in ROOT.glob("packages/*/src/**/*.py")]
    names = {name for text in sources for name in re.findall(r"= MessageSet\(\s*\"(\w+)\"", text)}
    num_sets = sum(len(re.findall(r"= MessageSet\(", text)) for text in sources)
    assert len(names) == num_sets
    assert names == set(MessageSet.declared)
    assert {*MessageSet.declared.values()} == {
        CLIENT_MESSAGES,
        ENGINE_MESSAGES,
        HOST_MESSAGES,
        RANK_MESSAGES,
        SHADOW_MESSAGES,
        KV_MESSAGES,
    }
    fuzzer = (ROOT / "benchmarks/fuzz_parsers.py").read_text()
    modules = {path for path in ROOT.glob("packages/*/src/**/*.py") if "= MessageSet(" in path.read_text()}
    for path in modules:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts[3:])
        assert f'"{module}"' in fuzzer


def drawn(messages: MessageSet[Any], tag: int, count: int) -> list[Any]:
    pick = random.Random(tag)
    return [messages.rows[tag].draw(pick) for _ in range(count)]


@pytest.mark.parametrize(("messages", "tag"), EACH)
def test_a_message_arrives_as_it_was_sent(messages: MessageSet[Any], tag: int) -> None:
    for message in drawn(messages, tag, 60):
        frame = messages.encode(message, EPOCH)
        epoch, arrived = messages.decode(frame)
        assert (epoch, type(arrived)) == (
            EPOCH if messages in (ENGINE_MESSAGES, RANK_MESSAGES) else 0,
            messages.rows[tag].cls,
        )
        assert arrived == message
        assert messages.encode(arrived, EPOCH) == frame


@pytest.mark.parametrize(("messages", "tag"), EACH)
def test_a_message_with_a_value_exchanged_anywhere_is_a_codec_error_or_a_message(
    messages: MessageSet[Any], tag: int
) -> None:
    pick, num_refused = random.Random(tag), 0
    for message in drawn(messages, tag, 20):
        values = msgpack.unpackb(messages.encode(message, EPOCH))
        for place, index in places(values):
            kept, place[index] = place[index], pick.choice(JUNK)
            try:
                messages.decode(msgpack.packb(values))
            except CodecError:
                num_refused += 1
            place[index] = kept
        assert messages.decode(msgpack.packb(values))[1] == message
    assert num_refused > 20


def places(values: list[Any]) -> list[tuple[list[Any], int]]:
    """Every list in a message with every index in it."""
    found = [(values, index) for index in range(len(values))]
    for value in values:
        if isinstance(value, list):
            found += places(value)
    return found


@pytest.mark.parametrize(("messages", "tag"), EACH)
def test_a_field_too_many_or_too_few_and_a_cut_frame_are_refused(messages: MessageSet[Any], tag: int) -> None:
    for message in drawn(messages, tag, 5):
        frame = messages.encode(message, EPOCH)
        values = msgpack.unpackb(frame)
        changed = [msgpack.packb([*values, 0]), msgpack.packb(values[:-1])]
        for wrong in (*changed, *[frame[:cut] for cut in range(0, len(frame), 1 + len(frame) // 50)]):
            with pytest.raises(CodecError):
                messages.decode(wrong)
