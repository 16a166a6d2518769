"""Signals before the server listens to them: remembered."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class EarlySignals:
    """Remembers that a stop was asked for."""

    def __init__(self) -> None:
        self.is_stop_requested = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes over the signals, and gives them back."""
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_stop_requested = True
