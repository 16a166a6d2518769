"""Messages between two processes: what is sent arrives, and what is no message is refused."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from llmstack_server.serving.process_channel import MAX_MESSAGE_BYTES, ChannelError, packed, receive, receive_from, send


def test_messages_arrive_in_order_and_the_end_is_none():
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            send(ours, {"flags": {"port": 0, "name": "ü"}})
            send(ours, {"ready": True})
        assert receive(theirs) == {"flags": {"port": 0, "name": "ü"}}
        assert receive(theirs) == {"ready": True}
        assert receive(theirs) is None


async def test_an_event_loop_receives_the_same():
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    with ours:
        send(ours, {"ready": True})
        assert await receive_from(reader) == {"ready": True}
    assert await receive_from(reader) is None
    writer.close()


@pytest.mark.parametrize("body", [b"no json", b"[1]", b"\xff"])
def test_what_is_no_message_is_refused(body: bytes):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("!I", len(body)) + body)
        with pytest.raises(ChannelError):
            receive(theirs)


def test_a_message_that_is_too_large_is_refused_on_both_sides():
    with pytest.raises(ChannelError, match="too large"):
        packed({"text": "x" * MAX_MESSAGE_BYTES})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("!I", MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ChannelError, match="too large"):
            receive(theirs)


def test_half_a_message_is_the_end():
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(packed({"ready": True})[:-1])
        assert receive(theirs) is None
