"""Cuts off clients that do not read."""

from __future__ import annotations

import asyncio


class SendTimer:
    """Ends a connection whose client has read nothing for a while; a slow one goes on. Runs while writing is paused."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        """Starts to wait for the client to read."""
        self.stop()
        num_unsent_bytes = transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._timeout_s, self._check, transport, num_unsent_bytes)

    def stop(self) -> None:
        """Stops to wait for the client."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, transport: asyncio.Transport, num_unsent_bytes: int) -> None:
        if transport.get_write_buffer_size() < num_unsent_bytes:
            self.start(transport)
        else:
            transport.abort()
