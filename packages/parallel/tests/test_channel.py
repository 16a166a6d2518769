"""Channels between ranks: frames of any size in their order, and what a sender learns of a rank that has ended."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from llmstack_parallel import socket_channel
from llmstack_parallel.errors import LostRankError
from llmstack_parallel.socket_channel import SocketChannel

Pair = tuple[SocketChannel, SocketChannel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = map(SocketChannel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def writers() -> list[threading.Thread]:
    """The threads that write what the kernel did not take at once."""
    return [thread for thread in threading.enumerate() if thread.name == "unsent-frames"]


def test_frames_of_any_size_come_in_their_order_and_no_sender_waits(pair: Pair) -> None:
    one, other = pair
    assert other.receive(0) is None
    frames = [b"", b"step", os.urandom(300_000), b"x", os.urandom(5_000_000), b"", b"last"]
    for frame in frames:
        one.send(frame)  # they are not read yet
    other.send(b"meanwhile")
    assert [other.receive(60_000) for _ in frames] == frames
    assert one.receive() == b"meanwhile"
    assert other.receive(0) is None
    for writer in writers():  # it may not know yet that there is nothing left
        writer.join(60)
    one.send(b"step")  # without the thread again
    assert writers() == []
    assert other.receive() == b"step"


def test_frames_that_come_together_are_distinguished(pair: Pair) -> None:
    one, other = pair
    for number in range(200):
        one.send(bytes([number]) * number)
    assert [other.receive() for _ in range(200)] == [bytes([number]) * number for number in range(200)]


def test_a_rank_that_has_ended_or_reads_nothing_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    monkeypatch.setattr(socket_channel, "MAX_WAITING_FRAMES", 4)
    for _ in range(4):
        one.send(bytes(1_000_000))
    with pytest.raises(LostRankError, match="takes no message"):
        one.send(b"")
    other.close()
    with pytest.raises(LostRankError, match="channel"):
        one.receive()
    fresh, ended = map(SocketChannel, socket.socketpair())
    fresh.send(b"last words")
    fresh.close()
    assert ended.receive() == b"last words"
    with pytest.raises(LostRankError, match="has closed its channel"):
        ended.receive(60_000)
    with pytest.raises(LostRankError, match="has closed its channel"):
        ended.send(b"step")
    ended.close()


def test_a_length_beyond_the_limit_is_refused_before_it_is_read(pair: Pair) -> None:
    one, other = pair
    one._socket.send((1 << 40).to_bytes(8, "little"))
    with pytest.raises(LostRankError, match="is the limit"):
        other.receive()
