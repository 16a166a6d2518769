"""Full garbage collections while nothing waits for them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Of the youngest two generations; these collections take a moment.
YOUNGEST_THRESHOLD = 700
MIDDLE_THRESHOLD = 10
# A full collection visits every object: 90 ms beside four bodies of 4 MiB. So the interpreter begins none by itself.
NEVER = 2**31 - 1
# Collections of the middle generation after which a full one may find something.
MIN_MIDDLE_COLLECTIONS = 10
MAX_WAIT_S = 60.0


@contextmanager
def start_without_collections() -> Iterator[None]:
    """Begins no collection until `IdleCollections.begin`: imports make many objects, nearly all of which stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_start() -> None:
    """Collects, and leaves what the start has made alone from now on; to be called while the engine core loads."""
    gc.collect()
    gc.freeze()


class IdleCollections:
    """Collects all generations when no request is in flight, or after a minute at the latest."""

    def __init__(self, count_in_flight: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._count_in_flight = count_in_flight
        self._clock = clock
        self._last_s = clock()

    def begin(self) -> None:
        """Leaves the objects of the start alone from now on, and the time of full collections to `tick`."""
        freeze_start()
        gc.enable()
        gc.set_threshold(YOUNGEST_THRESHOLD, MIDDLE_THRESHOLD, NEVER)

    def tick(self) -> None:
        """Collects if that is due; to be called a few times per second."""
        if gc.get_count()[2] < MIN_MIDDLE_COLLECTIONS:
            return
        now_s = self._clock()
        if self._count_in_flight() and now_s - self._last_s < MAX_WAIT_S:
            return
        gc.collect()
        self._last_s = now_s
