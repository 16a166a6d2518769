"""End of connections whose clients do not read."""

from __future__ import annotations

import asyncio


class TimedSending(asyncio.Protocol):
    """Base before one of uvicorn's protocols: ends a connection whose client has read nothing for a while.

    A slow client goes on. The timer runs while writing is paused.

    Attributes:
        send_timeout_s: Seconds in which a client must have read something.
    """

    send_timeout_s = 60.0
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _send_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_send_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts waiting for the client to read."""
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def _start_send_timer(self) -> None:
        self._stop_send_timer()
        num_unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.send_timeout_s, self._check_sending, num_unsent_bytes)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _check_sending(self, num_unsent_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < num_unsent_bytes:
            self._start_send_timer()
        else:
            self.transport.abort()
