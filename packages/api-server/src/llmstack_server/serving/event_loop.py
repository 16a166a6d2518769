"""Event loops, signals before they run, and blocking work in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Result = TypeVar("Result")


def in_daemon_thread(function: Callable[[], Result], name: str) -> asyncio.Future[Result]:
    """Runs a function that may block for minutes, such as a download, without delaying the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only where that is the result

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as caught:  # noqa: BLE001 - passed on to the future, whatever it is
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the result is not needed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class EarlySignals:
    """Stop signals that arrive before the event loop handles them."""

    def __init__(self) -> None:
        self.is_stop_requested = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs handlers for the stop signals, and restores the previous ones at the end."""
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_stop_requested = True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The factory of uvloop's event loops where uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
