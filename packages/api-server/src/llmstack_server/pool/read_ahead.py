"""The body of a request that is read while it waits for its model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from starlette.types import Message, Receive


class ReadAhead:
    """A `receive` that reads messages before they are asked for: so the end of a client is noticed."""

    def __init__(self, receive: Receive, messages: Iterable[Message] = ()) -> None:
        """`messages`: Those that were received already."""
        self._receive = receive
        self._messages = deque(messages)

    async def __call__(self) -> Message:
        """The next message, of those that were read first."""
        return self._messages.popleft() if self._messages else await self._receive()

    async def read_until_gone(self, max_bytes: int) -> None:
        """Returns when the client is gone. No more is read after so many bytes, and then it never returns."""
        num_bytes = 0
        while num_bytes <= max_bytes:
            message = await self._receive()
            self._messages.append(message)
            if message["type"] == "http.disconnect":
                return
            num_bytes += len(message.get("body", b""))
        await asyncio.get_running_loop().create_future()
