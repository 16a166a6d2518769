"""Destinations of a step log: a ring in memory, or a file."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from typing import Protocol

from llmstack_step_log.encoding import put_checkpoint, put_record
from llmstack_step_log.primitives import put_uint
from llmstack_step_log.records import Checkpoint, Tag

logger = logging.getLogger(__name__)

EARLIER = ".before"


class Sink(Protocol):
    """Takes segments, whole ones only: what it holds can be read at any moment."""

    def write(self, segment: bytes, checkpoint: Checkpoint) -> None:
        """Keeps a segment, which ends with `checkpoint`."""
        ...

    def change_header(self, header: bytes) -> None:
        """Takes the header of a log that begins with the next segment, if earlier ones should be dropped."""
        ...

    def dump(self) -> bytes:
        """The part of the log that is kept in memory, as a valid log."""
        ...

    def close(self) -> None:
        """No more follows. Idempotent."""
        ...


class RingSink:
    """The header and the last segments, in `max_bytes` bytes at most (the header not counted).

    Attributes:
        num_bytes: The size of the segments.
        num_dropped_steps: Steps whose segments had to go.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.num_dropped_steps = 0
        self._max_bytes = max_bytes
        self._header = self._next_header = b""
        self._segments: deque[tuple[bytes, Checkpoint, bytes]] = deque()  # each with the header of a log from there
        self._last_dropped: Checkpoint | None = None

    def write(self, segment: bytes, checkpoint: Checkpoint) -> None:
        """Keeps the segment, at the cost of the oldest ones; a snapshot only where as much is left for steps."""
        if not self._header:
            self._header = self._next_header = segment
            return
        if segment[0] == Tag.SNAPSHOT and len(segment) > self._max_bytes // 2:
            return
        self._segments.append((segment, checkpoint, self._next_header))
        self.num_bytes += len(segment)
        while self.num_bytes > self._max_bytes:
            dropped, self._last_dropped, _ = self._segments.popleft()
            self.num_bytes -= len(dropped)
            self.num_dropped_steps = self._last_dropped.num_steps
            self._header = self._segments[0][2] if self._segments else self._next_header

    def change_header(self, header: bytes) -> None:
        """Keeps the header for the time when only later segments are left."""
        self._next_header = header

    def close(self) -> None:
        """Does nothing: memory needs no close."""

    def dump(self) -> bytes:
        """A log of what is there; it says how many steps are missing from its beginning."""
        parts = [self._header]
        if self._last_dropped is not None:
            payload = bytearray()
            put_uint(payload, self.num_dropped_steps)
            gap = bytearray()
            put_record(gap, Tag.GAP, payload)
            put_checkpoint(gap, Checkpoint(self.num_dropped_steps, self._last_dropped.digest))
            parts.append(bytes(gap))
        return b"".join([*parts, *(segment for segment, _, _ in self._segments)])


class FileSink:
    """A file that only its owner can read, since it holds what users said, as token ids.

    A disk that fills up ends the log, not the engine.
    """

    def __init__(self, path: str) -> None:
        """Creates the file. One of an earlier run gets the name with `EARLIER` at its end: it may tell of a crash.

        Raises:
            OSError: It cannot be written.
        """
        self._path = path
        _keep_earlier(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
        self._file: int | None = os.open(path, flags, 0o600)

    def write(self, segment: bytes, checkpoint: Checkpoint) -> None:
        """Appends the segment, unbuffered."""
        if self._file is None:
            return
        view = memoryview(segment)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            logger.error("the log of steps %s ends here: %s", self._path, error.strerror)
            self.close()

    def change_header(self, header: bytes) -> None:
        """Does nothing: a file keeps its beginning."""

    def dump(self) -> bytes:
        """Nothing: the file has it."""
        return b""

    def close(self) -> None:
        """Closes the file; later calls do nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _keep_earlier(path: str) -> None:
    """Renames a file that has something in it, in place of one that was renamed before."""
    target = os.path.realpath(path)  # a link goes on leading where it does
    with contextlib.suppress(OSError):  # a folder that may not be changed: then the file is emptied
        if os.path.isfile(target) and os.path.getsize(target):
            os.replace(target, target + EARLIER)
