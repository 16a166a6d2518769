"""A thread that seals and writes files, at a small share of a processor."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from llmstack_engine_core.disk_cache.block_files import BlockFiles
from llmstack_engine_core.disk_cache.scopes import Scope

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES: Final = 16 << 20
MAX_CORE_SHARE: Final = 0.02
_MAX_CREDIT_S: Final = 10.0
"""Time without work after which as much work as in that time may be done at once."""
_MIN_AVAILABLE_KB: Final = 256 << 10
_MEMORY_INTERVAL_S: Final = 1.0


class Pace:
    """Keeps work to a share of one processor, by its processor time. For any thread."""

    def __init__(self, clock: Callable[[], float], share: float = MAX_CORE_SHARE) -> None:
        self._clock, self._share = clock, share
        self._lock = threading.Lock()
        self._next_s = clock() - _MAX_CREDIT_S

    def is_due(self) -> bool:
        """Whether more work may be done now."""
        return self._clock() >= self._next_s

    def spend(self, processor_s: float) -> None:
        """Counts work that was done."""
        with self._lock:
            self._next_s = max(self._next_s, self._clock() - _MAX_CREDIT_S) + processor_s / self._share


class Sealable(NamedTuple):
    """A text that waits to be written."""

    scope: Scope
    name: str
    text: bytearray


class WriteBehind:
    """A thread that seals and writes texts, of which few wait at one time.

    Attributes:
        num_written_bytes: Counter of bytes in files.
        num_dropped: Counter of texts that were not written, for want of room or since the disk failed.
    """

    def __init__(self, files: BlockFiles, pace: Pace, clock: Callable[[], float]) -> None:
        self.num_written_bytes = self.num_dropped = 0
        self._files, self._pace, self._clock = files, pace, clock
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._names: set[str] = set()  # of what waits
        self._num_queued_bytes = 0
        self._lock = threading.Lock()
        self._is_failing = self._has_memory = False
        self._next_look_s = clock()
        self._thread = threading.Thread(target=self._run, name="write-kv", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        """Whether another text may be added: few wait, and the machine has memory left."""
        if self._num_queued_bytes >= MAX_QUEUED_BYTES:
            return False
        if self._clock() >= self._next_look_s:
            self._has_memory = _available_kb() >= _MIN_AVAILABLE_KB
            self._next_look_s = self._clock() + _MEMORY_INTERVAL_S
        return self._has_memory

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, text: Sealable) -> None:
        """Writes a text some time later."""
        with self._lock:
            self._names.add(text.name)
            self._num_queued_bytes += len(text.text)
        self._queue.put(partial(self._write, text))

    def after(self, do: Callable[[], None]) -> None:
        """Calls `do` on the thread, after what was added before; it must not raise."""
        self._queue.put(do)

    def close(self, wait_s: float) -> None:
        """Ends the thread after what waits, which takes at most `wait_s`. Idempotent."""
        self._queue.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (do := self._queue.get()) is not None:
            begun_s = time.thread_time()
            do()
            self._pace.spend(time.thread_time() - begun_s)

    def _write(self, text: Sealable) -> None:
        is_written, parts = False, list[bytes]()
        try:
            parts = text.scope.seal(text.name, text.text)
            is_written, reason = self._files.write(text.name, parts, text.scope.owner), "there is too little room"
        except (OSError, MemoryError) as error:
            reason = str(error) or "no memory is left"
        if is_written:
            self.num_written_bytes += sum(map(len, parts))
        else:
            self.num_dropped += 1
        with self._lock:
            self._names.discard(text.name)
            self._num_queued_bytes -= len(text.text)
        if not is_written and not self._is_failing:  # once, until a file is written again
            logger.warning("the KV cache on disk: blocks could not be written, and the next ones are tried: %s", reason)
        self._is_failing = not is_written


def _available_kb() -> int:
    """Memory that the system could hand out; plenty where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return _MIN_AVAILABLE_KB
