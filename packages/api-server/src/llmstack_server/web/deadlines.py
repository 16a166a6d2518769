"""Limits on the duration of a request: the server's and the client's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from llmstack_server.state.server_state import OutputStream
from llmstack_server.web.errors import HTTPError, client_deadline_exceeded, deadline_exceeded
from llmstack_server.web.streams import close

Output = TypeVar("Output")


class ClientDeadline(NamedTuple):
    """The deadline of one request: what the client gave it, and when that is over by the loop's clock."""

    limit_s: float
    end_s: float


current_deadline: ContextVar[ClientDeadline | None] = ContextVar("client_deadline", default=None)
"""The deadline of the current request, where its client gave one."""

waited_s: ContextVar[float] = ContextVar("waited_s", default=0.0)
"""Seconds that the current request has waited for its model, before anything of it was read."""


def limit_deadline(limit_s: float) -> None:
    """Gives the current request so many seconds, less what it has waited, if it has no earlier deadline."""
    given, end_s = current_deadline.get(), asyncio.get_running_loop().time() + limit_s - waited_s.get()
    if given is None or end_s < given.end_s:
        current_deadline.set(ClientDeadline(limit_s, end_s))


def engine_deadline_s() -> float | None:
    """The deadline of the current request on the engine's clock; None where its client gave none."""
    given = current_deadline.get()
    return None if given is None else time.monotonic() + given.end_s - asyncio.get_running_loop().time()


def first_limit(timeout_s: float | None) -> tuple[float, HTTPError] | None:
    """The seconds that are left to the current request, and the error after them; None without a limit.

    `timeout_s`: The server's limit, from now on.
    """
    client = current_deadline.get()
    if client is not None:
        left_s = max(client.end_s - asyncio.get_running_loop().time(), 0.0)
        if timeout_s is None or left_s <= timeout_s:
            return left_s, HTTPError(client_deadline_exceeded(client.limit_s))
    return None if timeout_s is None else (timeout_s, HTTPError(deadline_exceeded(timeout_s)))


def timed(stream: AsyncIterator[Output], timeout_s: float | None) -> AsyncIterator[Output]:
    """The same stream; raises HTTPError 504, or 408 for the client's deadline, when the time is over."""
    limit = first_limit(timeout_s)
    return stream if limit is None else _timed(stream, *limit)


async def _timed(stream: AsyncIterator[Output], left_s: float, error: HTTPError) -> AsyncIterator[Output]:
    end_s = asyncio.get_running_loop().time() + left_s
    try:
        while True:
            try:
                # Not around the `yield`: the reader's work is not interrupted.
                async with asyncio.timeout_at(end_s):
                    output = await anext(stream)
            except StopAsyncIteration:
                return
            yield output
    except TimeoutError:
        raise error from None
    finally:
        await close(stream)


def set_deadline(outputs: OutputStream, timeout_s: float | None) -> None:
    """Ends a stream of outputs with a 504, or a 408 for the client's deadline, when the time is over."""
    limit = first_limit(timeout_s)
    if limit is not None:
        outputs.fail_after(*limit)
