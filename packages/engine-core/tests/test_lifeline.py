"""Orders over the socket between a process and the one that started it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from llmstack_engine_core.ipc.lifeline import MAX_ORDER_BYTES, receive_order, send_order
from llmstack_types import EngineStartError


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_an_order_of_any_size_arrives_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    order = ["a" * 500_000, 7, {"b": [None, True, b"\0"]}]
    sender = threading.Thread(target=send_order, args=(ours, order))
    sender.start()
    assert receive_order(theirs) == order
    sender.join()


def test_an_end_of_the_sender_within_an_order_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    ours.sendall(struct.pack("!I", 100) + b"x" * 99)
    ours.close()
    with pytest.raises(EngineStartError, match="ended before"):
        receive_order(theirs)


def test_an_order_that_is_too_large_is_refused_before_it_is_read(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    ours.sendall(struct.pack("!I", MAX_ORDER_BYTES + 1))
    with pytest.raises(EngineStartError, match=f"{MAX_ORDER_BYTES + 1} bytes"):
        receive_order(theirs)


def test_a_receiver_that_has_ended_is_no_error_of_the_sender(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.close()
    send_order(ours, ["a"])
