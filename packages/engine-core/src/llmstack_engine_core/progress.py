"""Progress of an engine core, in memory that it shares with its supervisor.

It imports little: the launcher starts a process with it before all else.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from typing import Final

# On it, an engine core's process writes the stacks of its threads to its log and goes on.
STACKS_SIGNAL: Final = signal.SIGUSR2
# A step may take so many times what its tokens took before.
SLOWDOWN: Final = 20.0
_COUNT: Final = struct.Struct("=Q")
_EXPECTED: Final = struct.Struct("=d")
_EXPECTED_AT: Final = 8
_SIZE: Final = 16


class SharedProgress:
    """A counter of progress, and how long the present step may take; written by one process, read by another.

    Both are words of eight bytes, each of which is written at once. The memory has no name in the file system.
    """

    def __init__(self, fd: int) -> None:
        """Maps the memory of `make_progress_file`; the descriptor may be closed then."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._num_advances = self.count

    @property
    def count(self) -> int:
        """The number of advances of the engine core; 0 until it is ready."""
        return int(_COUNT.unpack_from(self._memory, 0)[0])

    @property
    def expected_s(self) -> float:
        """The expected duration of what began with the last advance; 0 where that is a moment."""
        return float(_EXPECTED.unpack_from(self._memory, _EXPECTED_AT)[0])

    def report(self) -> None:
        """Notes progress within what began with the last advance."""
        self._num_advances += 1
        _COUNT.pack_into(self._memory, 0, self._num_advances)

    def advance(self, expected_s: float = 0.0) -> None:
        """Notes progress, and how long the next work is expected to take."""
        _EXPECTED.pack_into(self._memory, _EXPECTED_AT, expected_s)
        self._num_advances += 1
        _COUNT.pack_into(self._memory, 0, self._num_advances)


def make_progress_file() -> int:
    """The descriptor of such memory, which is zero; the caller closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("llmstack-progress")
        os.ftruncate(fd, _SIZE)
        return fd
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.truncate(_SIZE)
        return os.dup(file.fileno())


class HangWatch:
    """Finds an engine core that makes no progress.

    Attributes:
        interval_s: How often `look` is to be called.
    """

    def __init__(self, progress: SharedProgress, timeout_s: float) -> None:
        """`timeout_s` 0 disables it."""
        self.interval_s = min(1.0, timeout_s / 4) or 1.0
        self._progress = progress
        self._timeout_s = timeout_s
        self._last_count = 0
        self._last_look_s: float | None = None
        self._without_progress_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether there was any progress."""
        return self._progress.count > 0

    def look(self, now_s: float) -> float:
        """The time without progress, if that is too long; else 0.

        A pause between two looks counts as two intervals at most: the machine may have been frozen meanwhile, and this
        process with it.
        """
        pause_s = 0.0 if self._last_look_s is None else min(now_s - self._last_look_s, 2 * self.interval_s)
        self._last_look_s = now_s
        count = self._progress.count
        if count != self._last_count or not count or not self._timeout_s:
            self._last_count, self._without_progress_s = count, 0.0
            return 0.0
        self._without_progress_s += pause_s
        limit_s = max(self._timeout_s, SLOWDOWN * self._progress.expected_s)
        return self._without_progress_s if self._without_progress_s > limit_s else 0.0
