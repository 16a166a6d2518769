"""`--request-timeout`: the server's limit on the duration of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from llmstack_server.protocols import OutputStream
from llmstack_server.web.errors import HTTPError, deadline_exceeded
from llmstack_server.web.streams import close

Output = TypeVar("Output")


async def timed(stream: AsyncIterator[Output], timeout_s: float) -> AsyncIterator[Output]:
    """The same stream; raises HTTPError 504 when the time is over."""
    end_s = asyncio.get_running_loop().time() + timeout_s
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
        raise HTTPError(deadline_exceeded(timeout_s)) from None
    finally:
        await close(stream)


def set_deadline(outputs: OutputStream, timeout_s: float) -> None:
    """Ends a stream of outputs with a 504 when the time is over."""
    outputs.fail_after(timeout_s, HTTPError(deadline_exceeded(timeout_s)))
