"""Progress of an engine core, in memory that it shares with its supervisor."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Final, cast

from llmstack_engine_core.protocols import EventHook, ReportingRunner
from llmstack_types import EngineCoreOutputs, SchedulerOutput, StepRecord

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
        """How often the engine core has advanced; 0 until it is ready."""
        return int(_COUNT.unpack_from(self._memory, 0)[0])

    @property
    def expected_s(self) -> float:
        """How long what began with the last advance is expected to take; 0 where that is a moment."""
        return float(_EXPECTED.unpack_from(self._memory, _EXPECTED_AT)[0])

    def report(self) -> None:
        """Notes progress within what began with the last advance."""
        self._num_advances += 1
        _COUNT.pack_into(self._memory, 0, self._num_advances)

    def advance(self, expected_s: float = 0.0) -> None:
        """Notes progress, and that what follows takes about so long."""
        _EXPECTED.pack_into(self._memory, _EXPECTED_AT, expected_s)
        self._num_advances += 1
        _COUNT.pack_into(self._memory, 0, self._num_advances)


def make_progress_file() -> int:
    """The descriptor of such memory, which is zero; the caller closes it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(_SIZE)
        return os.dup(file.fileno())


class StepTimes:
    """How long steps take, by the powers of two of their tokens: the cost model of the watch over a step."""

    def __init__(self, unknown_s: float) -> None:
        """`unknown_s`: What a step of a size beyond all measured ones may take: the first ones compile and capture."""
        self._unknown_s = unknown_s
        self._class_to_s: dict[int, float] = {}

    def expected_s(self, num_tokens: int) -> float:
        """The time of a step of so many tokens."""
        size = num_tokens.bit_length()
        known = self._class_to_s.get(size)
        if known is not None:
            return known
        larger = [seconds for other, seconds in self._class_to_s.items() if other > size]
        return min(larger, default=self._unknown_s)

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; slower ones count at once, faster ones by and by."""
        size = num_tokens.bit_length()
        last_s = self._class_to_s.get(size, 0.0)
        self._class_to_s[size] = max(seconds, last_s + (seconds - last_s) / 16)


class ProgressHook(EventHook):
    """Reports each step that computes tokens as progress."""

    def __init__(self, progress: SharedProgress, unknown_s: float) -> None:
        self._progress = progress
        self._unknown_s = unknown_s
        self._times = StepTimes(unknown_s)

    def listen_to(self, runner: object) -> None:
        """Lets a runner that can report progress within its steps; a step may then pause for a tenth of the time only.

        To be called when the engine core is ready: its progress begins then.
        """
        if hasattr(runner, "report_progress_to"):
            cast(ReportingRunner, runner).report_progress_to(self._progress.report)
            self._times = StepTimes(self._unknown_s / 10)

    def on_scheduled(self, scheduled: SchedulerOutput) -> None:
        """A step without tokens is no progress: an engine core that schedules nothing for ever is stuck."""
        num_tokens = scheduled.total_num_scheduled_tokens
        if num_tokens:
            self._progress.advance(self._times.expected_s(num_tokens))

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """Learns what the step took."""
        num_tokens = sum(row.num_scheduled_tokens for row in record.rows)
        if num_tokens:
            self._times.note(num_tokens, sum(record.phases))
            self._progress.advance()


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
        """How long there has been no progress, if that is too long; else 0.

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
