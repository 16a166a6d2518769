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

    def __init__(self, *, stops_on_hangup: bool = True) -> None:
        """`stops_on_hangup`: Whether SIGHUP is a stop signal; otherwise it has no effect yet."""
        self.is_stop_requested = False
        self._stops_on_hangup = stops_on_hangup

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs handlers for the stop signals, and restores the previous ones at the end."""
        numbers = STOP_SIGNALS if is_hangup_ignored() else (*STOP_SIGNALS, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or self._stops_on_hangup:
            self.is_stop_requested = True


def settle(outcome: asyncio.Future[int], code: int) -> None:
    """Sets the exit code of a process, unless it has one."""
    if not outcome.done():
        outcome.set_result(code)


def is_hangup_ignored() -> bool:
    """Whether the process was started to survive its terminal, as by `nohup`."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@contextmanager
def handled_signals(on_stop: Callable[[int], None], on_hangup: Callable[[], None]) -> Iterator[None]:
    """Lets the running event loop handle the stop signals and SIGHUP, unless that is ignored."""
    loop = asyncio.get_running_loop()
    has_hangup = not is_hangup_ignored()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_stop, number)
    if has_hangup:
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        yield
    finally:
        for number in (*STOP_SIGNALS, signal.SIGHUP) if has_hangup else STOP_SIGNALS:
            loop.remove_signal_handler(number)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The factory of uvloop's event loops where uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
