"""The thread that encodes snapshots beside the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from llmstack_step_log.snapshots import State, encode_snapshot

logger = logging.getLogger(__name__)

# At the end of a run; the largest state takes about two seconds.
MAX_WAIT_S = 30.0


class SnapshotWriter:
    """Encodes one snapshot at a time; one that comes meanwhile is left out. Used by one thread, the engine core's.

    Attributes:
        num_left_out: Counter of moments without a snapshot: the state was too large, or the last one not yet encoded.
    """

    def __init__(self, marker: bytes) -> None:
        self.num_left_out = 0
        self._marker = marker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._pending: Future[bytes] | None = None

    def begin(self, num_steps: int, last_us: int, digest: bytes, take_state: Callable[[], State]) -> None:
        """Copies the state now, and encodes it in the thread."""
        if self._pending is not None:
            self._leave_out("the one before is still being encoded")
            return
        try:
            state = take_state()
        except ValueError as error:
            self._leave_out(str(error))
            return
        self._pending = self._thread.submit(encode_snapshot, self._marker, num_steps, last_us, digest, state)

    def take(self) -> bytes | None:
        """The payload of a snapshot that is encoded, once."""
        if self._pending is None or not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        error = pending.exception()
        if error is not None:
            self._leave_out(f"{type(error).__name__}: {error}")
            return None
        return pending.result()

    def close(self) -> bytes | None:
        """Waits for the last one, and ends the thread."""
        self._thread.shutdown(wait=False)
        if self._pending is not None:
            wait([self._pending], MAX_WAIT_S)
        return self.take()

    def _leave_out(self, why: str) -> None:
        if not self.num_left_out:
            logger.warning("the log of steps lacks a snapshot: %s", why[:300])
        self.num_left_out += 1
