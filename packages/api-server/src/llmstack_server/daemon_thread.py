"""Work that may block for minutes, beside an event loop and not in the way of its end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def in_daemon_thread(function: Callable[[], Result], name: str) -> asyncio.Future[Result]:
    """Runs what may block for minutes: a signal must end the server at once, and nothing can interrupt a download."""
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
        except Exception as caught:  # noqa: BLE001 - whatever it is, the event loop has to hear of it
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
