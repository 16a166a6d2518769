"""The engine core's end of its shadow: a queue, two threads and a process."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from typing import BinaryIO, Final, cast

from llmstack_engine_core.messages.kinds import CodecError
from llmstack_insight.rerun import changed_plane, recorded_plane
from llmstack_insight.shadow.wire import MAX_REPORT_BYTES, Begin, Segment, read_message, write_message
from llmstack_step_log import LogHeader
from llmstack_step_log.step_log import STEPS_PER_CHECKPOINT
from llmstack_types import ShadowReport

logger = logging.getLogger(__name__)

# A slow reader loses segments over this; 256 rows make some 20 kB per step.
MAX_QUEUED_BYTES: Final = 32 << 20
END_TIMEOUT_S: Final = 2.0
COMMAND: Final = (sys.executable, "-m", "llmstack_insight.shadow.child")


class ShadowFeed:
    """Gives the step log to a process that follows it, and takes its reports. Nothing of it waits, or raises.

    The engine core's thread puts segments into a queue, about one in 64 steps. A thread of its own writes them.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str, header: LogHeader) -> None:
        self._process = process
        self._name = name
        self._queue: deque[Begin | Segment] = deque([Begin(header.pack(), name)])
        self._num_queued_bytes = 0
        self._num_lost_steps = 0
        self._is_closed = False
        self._has_work = threading.Condition()
        self._report: ShadowReport | None = None
        self._is_new = False
        self._threads = [
            threading.Thread(target=target, name=f"shadow-{target.__name__.strip('_')}", daemon=True)
            for target in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, segment: bytes, decisions: list[bytes], start_us: int) -> None:
        """Queues a segment, or drops it where the queue is full."""
        num_bytes = len(segment) + sum(map(len, decisions))
        with self._has_work:
            if self._is_closed:
                return
            if self._num_queued_bytes + num_bytes > MAX_QUEUED_BYTES:
                self._num_lost_steps += STEPS_PER_CHECKPOINT
                return
            lost, self._num_lost_steps = self._num_lost_steps, 0
            self._queue.append(Segment(segment, decisions, start_us, lost))
            self._num_queued_bytes += num_bytes
            self._has_work.notify()

    def take_report(self) -> ShadowReport | None:
        """The last report, once; None where there is no new one."""
        if not self._is_new:
            return None
        self._is_new = False
        return self._report

    def close(self) -> None:
        """Ends the process, for which the reading thread waits, and the threads; waits a moment. Idempotent."""
        with self._has_work:
            self._is_closed = True
            self._has_work.notify()
        self._process.kill()
        for thread in self._threads:
            thread.join(END_TIMEOUT_S)

    def _next(self) -> Begin | Segment | None:
        with self._has_work:
            while not self._queue and not self._is_closed:
                self._has_work.wait()
            if self._is_closed:
                return None
            message = self._queue.popleft()
            if isinstance(message, Segment):
                self._num_queued_bytes -= len(message.records) + sum(map(len, message.decisions))
            return message

    def _write(self) -> None:
        stream = cast("BinaryIO", self._process.stdin)
        try:
            while (message := self._next()) is not None:
                write_message(stream, message)
        except (OSError, CodecError):
            pass  # it has ended, and the reader says so
        with contextlib.suppress(OSError):
            stream.close()

    def _read(self) -> None:
        stream = cast("BinaryIO", self._process.stdout)
        problem = "its process has ended"
        try:
            while (report := read_message(stream, MAX_REPORT_BYTES)) is not None:
                if not isinstance(report, ShadowReport):
                    raise CodecError("the message is no report")
                problem = report.problem or problem
                self._report, self._is_new = report, True
        except (OSError, CodecError) as error:
            problem = f"its report cannot be read: {error}"
        with contextlib.suppress(OSError):
            stream.close()
        self._end(problem)

    def _end(self, problem: str) -> None:
        with self._has_work:
            was_closed, self._is_closed = self._is_closed, True
            self._queue.clear()
            self._has_work.notify()
        if not was_closed:
            logger.warning("the shadow scheduler %s has ended: %s", self._name[:64], problem)
            self._report = (self._report or ShadowReport(self._name))._replace(problem=problem)
            self._is_new = True
        self._process.kill()
        self._process.wait()


def start_shadow(name: str, header: LogHeader) -> ShadowFeed:
    """Starts a process that runs the control plane `name` beside the engine core.

    Raises:
        PlaneError: The text names no control plane. A class is imported in the process alone.
        OSError: There is no room for a process.
    """
    changed_plane(recorded_plane(*header.configs()), name, imports=False)
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    logger.info("shadow scheduler %s: process %d", name[:64], process.pid)
    return ShadowFeed(process, name, header)
