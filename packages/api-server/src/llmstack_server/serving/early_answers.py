"""Answers in the call that reads the headers, and the wait for that call."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Coroutine

from starlette.types import ASGIApp, Receive, Scope, Send

from llmstack_server.web.errors import ErrorAnswer
from llmstack_server.web.middleware import send_error

_LAST_DATA_RECEIVED = 52
"""Place of `tcpi_last_data_recv` in Linux's `struct tcp_info`: milliseconds, 32 bits."""


def waited_s(connection: socket.socket | None) -> float:
    """Seconds since the last bytes of a connection came, as the kernel counts; 0 where it does not count them.

    That is the time that a request has waited to be read, in whole milliseconds: to be accepted, and for the loop.
    """
    if connection is None or connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED + 4)
    except OSError:  # the client has gone already
        return 0.0
    return int.from_bytes(info[_LAST_DATA_RECEIVED:], sys.byteorder) / 1000


class EagerLoop:
    """An event loop whose tasks end at once: the answer is complete when `create_task` returns."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.call_later = loop.call_later

    def create_task(self, coroutine: Coroutine[object, object, None], **_: object) -> EagerLoop:
        """Runs a coroutine that waits for nothing."""
        with contextlib.suppress(StopIteration):
            coroutine.send(None)
        return self

    def add_done_callback(self, callback: Callable[..., object]) -> None:
        """Does nothing, under the name that tasks have: there is nothing to be called back for."""


def answering(answer: ErrorAnswer) -> ASGIApp:
    """An application that gives one answer, to any request."""

    async def answer_at_once(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(answer, receive, send)

    return answer_at_once
