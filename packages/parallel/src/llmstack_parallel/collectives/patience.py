"""Time limits of one rank that waits for others."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Final

from llmstack_kernels.collective import CollectiveError

LOST: Final = "another rank has ended or given up"
LATE: Final = "another rank did not reach the same point in time"


class Patience:
    """The limit of waits, and whether they are to end at once."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._is_aborted = threading.Event()

    def deadline(self) -> float:
        """When a wait that begins now has taken too long."""
        return monotonic() + self.timeout_s

    def check(self, deadline: float | None = None) -> None:
        """Raises CollectiveError where a wait is to end."""
        if self._is_aborted.is_set():
            raise CollectiveError(LOST)
        if deadline is not None and monotonic() > deadline:
            raise CollectiveError(LATE)

    def abort(self) -> None:
        """Ends all waits; from any thread."""
        self._is_aborted.set()
