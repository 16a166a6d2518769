"""The process of a shadow scheduler.

It runs as `python -m llmstack_insight.shadow.child`, reads the step log from
standard input, and writes reports to standard output.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
from typing import BinaryIO, Final

from llmstack_insight.rerun import changed_plane, recorded_plane
from llmstack_insight.shadow.shadow import Shadow
from llmstack_insight.shadow.wire import Begin, Segment, read_message, write_message
from llmstack_step_log import LogHeader
from llmstack_step_log.step_log import STEPS_PER_CHECKPOINT
from llmstack_types import ShadowReport

REPORT_INTERVAL_S: Final = 1.0
IDLE_WAIT_S: Final = 0.25
# The log is written at the latest when the engine core is idle, so what came before that has arrived by then.
IDLE_AGE_S: Final = 2.0
CHUNK_S: Final = 0.02
NICENESS: Final = 19
MAX_BEHIND_S: Final = 5.0


class Budget:
    """Processor time: a share of a core, of which a little may be saved."""

    def __init__(self, share: float = 0.04, saved_s: float = 3.0, max_debt_s: float = 1.0) -> None:
        self._share, self._saved_s, self._max_debt_s = share, saved_s, max_debt_s
        self._credit_s = saved_s
        self._wall_s, self._cpu_s = time.monotonic(), time.process_time()

    def update(self) -> None:
        """Adds what has been earned since the last call, less what was spent."""
        wall_s, cpu_s = time.monotonic(), time.process_time()
        self._credit_s += (wall_s - self._wall_s) * self._share - (cpu_s - self._cpu_s)
        self._credit_s = min(self._credit_s, self._saved_s)
        self._wall_s, self._cpu_s = wall_s, cpu_s

    @property
    def has_time(self) -> bool:
        """Whether anything may be simulated."""
        return self._credit_s > 0

    @property
    def is_full(self) -> bool:
        """Whether nearly all that may be saved is saved."""
        return self._credit_s >= 0.9 * self._saved_s

    @property
    def is_overdrawn(self) -> bool:
        """Whether even reading the log takes too much."""
        return self._credit_s < -self._max_debt_s


class Pace:
    """Decides which segments are followed: none from where time is short until enough of it is saved again.

    Attributes:
        num_skipped: Segments that were not followed since the last one that was.
    """

    def __init__(self) -> None:
        self.num_skipped = 0
        self._is_pausing = False

    def follows(self, budget: Budget, behind_s: float) -> bool:
        """Whether the next segment is followed."""
        if self._is_pausing:
            self._is_pausing = not budget.is_full
        else:
            self._is_pausing = budget.is_overdrawn or (not budget.has_time and behind_s > MAX_BEHIND_S)
        return not self._is_pausing


class Timer:
    """A stretch of time."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    def is_left(self) -> bool:
        """Whether it is not over."""
        return time.monotonic() < self._end_s


def main() -> int:
    """Follows the log to its end; 1 with a last report where something fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends first, and with it the log
    os.nice(NICENESS)
    stream = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 - a buffer hides from `select`
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # a scheduler that prints must not spoil the reports
    name = "-"
    try:
        first = read_message(stream)
        if not isinstance(first, Begin):
            return 0
        name = first.name
        scheduler, cache = LogHeader.unpack(first.header).configs()
        plane = recorded_plane(scheduler, cache)
        shadow = Shadow(name, plane, changed_plane(plane, name))
        gc.freeze()
        _follow(stream, out, shadow)
    except OSError:
        return 0  # the engine core is gone
    except Exception as error:  # noqa: BLE001 - whatever another scheduler raises ends the shadow alone, with a sentence
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        write_message(out, ShadowReport(name, problem, cpu_s=time.process_time()))
        return 1
    return 0


def _follow(stream: BinaryIO, out: BinaryIO, shadow: Shadow) -> None:
    budget, pace, is_busy = Budget(), Pace(), False
    reported_s, last = 0.0, None
    while True:
        budget.update()
        if select.select([stream], [], [], 0.0 if is_busy and budget.has_time else IDLE_WAIT_S)[0]:
            message = read_message(stream)
            if not isinstance(message, Segment):
                return
            _take(message, shadow, pace, budget)
        if budget.has_time and not pace.num_skipped:
            is_busy = shadow.work(Timer(CHUNK_S).is_left, time.monotonic() - IDLE_AGE_S)
        now_s = time.monotonic()
        if now_s - reported_s >= REPORT_INTERVAL_S:
            report = shadow.report(time.process_time())
            if last is None or report[:4] != last[:4] or now_s - reported_s >= 10 * REPORT_INTERVAL_S:
                write_message(out, report)
                last, reported_s = report, now_s


def _take(message: Segment, shadow: Shadow, pace: Pace, budget: Budget) -> None:
    """Follows a segment, or leaves it out."""
    if not pace.follows(budget, shadow.behind_s):
        if not pace.num_skipped:
            shadow.skip(0)
        pace.num_skipped += 1
        shadow.note_shed(STEPS_PER_CHECKPOINT + message.num_lost_steps)
        return
    if message.num_lost_steps or pace.num_skipped:
        shadow.skip(message.num_lost_steps)
    pace.num_skipped = 0
    shadow.take(message.records, message.decisions, message.start_us)


if __name__ == "__main__":
    sys.exit(main())
