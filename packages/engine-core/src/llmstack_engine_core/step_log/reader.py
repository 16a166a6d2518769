"""Reader of step logs: checks every byte, then returns the events in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmstack_engine_core.step_log.encoding import FORMAT_VERSION, MAGIC, EventDecoder, read_checkpoint
from llmstack_engine_core.step_log.errors import StepLogError
from llmstack_engine_core.step_log.header import LogHeader
from llmstack_engine_core.step_log.primitives import Cursor
from llmstack_engine_core.step_log.records import Checkpoint, Event, Tag

Record = tuple[int, int, int, int]
"""A record: where it begins, its tag, where its payload begins, and where that ends."""


_NO_HEADER = "is truncated or damaged in its header"


class RecordedRun:
    """A log in memory, checked.

    Attributes:
        header: What the control plane was built with.
        is_closed: The run ended in good order; otherwise the process was killed, or goes on.
        last: The last checkpoint: what the log proves.
        truncated_at: Where the last segment begins that is not whole; None where all are.
    """

    def __init__(self, data: bytes, *, up_to_damage: bool = False) -> None:
        """Checks `data`. `up_to_damage`: Uses what comes before a damaged segment, as before one that is not whole.

        Raises:
            StepLogError: It is no log of this version, or damaged.
        """
        if not data.startswith(MAGIC):
            raise StepLogError("is no log of steps")
        if len(data) <= len(MAGIC):
            raise StepLogError(_NO_HEADER)
        if data[len(MAGIC)] != FORMAT_VERSION:
            raise StepLogError(f"has format version {data[len(MAGIC)]}, and these packages read {FORMAT_VERSION}")
        self._data = data
        self._up_to_damage = up_to_damage
        self._start, packed_header = self._read_header()
        self.last, self._end = self._check_segments()
        self.truncated_at = None if self._end == len(data) else self._end
        self.header = LogHeader.unpack(packed_header)

    @property
    def is_closed(self) -> bool:
        """Whether the run ended in good order."""
        return self.last.is_closed and self.truncated_at is None

    def events(self) -> Iterator[Event]:
        """Everything up to the last checkpoint.

        Raises:
            StepLogError: A record says what these packages do not understand.
        """
        decoder = EventDecoder()
        for _, tag, start, end in self._records():
            if end > self._end:
                return
            yield decoder.decode(tag, self._data[start:end])

    def _read_header(self) -> tuple[int, bytes]:
        cursor = Cursor(self._data, len(MAGIC) + 1)
        try:
            packed = cursor.take(cursor.take_uint())
        except StepLogError as error:
            raise StepLogError(_NO_HEADER) from error
        return cursor.position, packed

    def _records(self) -> Iterator[Record]:
        """Records up to the first that is not whole."""
        data = self._data
        cursor = Cursor(data, self._start)
        while not cursor.is_at_end:
            record_start, tag = cursor.position, data[cursor.position]
            cursor.position += 1
            try:
                length = cursor.take_uint()
            except StepLogError:
                return
            start, end = cursor.position, cursor.position + length
            if end > len(data):
                return
            cursor.position = end
            yield record_start, tag, start, end

    def _check_segments(self) -> tuple[Checkpoint, int]:
        """The last checkpoint, and where it ends."""
        segment_start, last = 0, None
        for record_start, tag, start, end in self._records():
            if tag == Tag.CHECKPOINT:
                try:
                    last = self._end_segment(segment_start, record_start, self._data[start:end])
                except StepLogError:
                    if last is None or not self._up_to_damage:
                        raise
                    break
                segment_start = end
        if last is None:
            raise StepLogError(_NO_HEADER)
        return last, segment_start

    def _end_segment(self, start: int, end: int, payload: bytes) -> Checkpoint:
        try:
            return read_checkpoint(payload, self._data[start:end])
        except StepLogError as error:
            raise StepLogError(f"is damaged between byte {start} and byte {end}") from error


def read_step_log(path: str | Path, *, up_to_damage: bool = False) -> RecordedRun:
    """Reads and checks a whole file; `up_to_damage` as in `RecordedRun`.

    Raises:
        StepLogError: It cannot be read, is no log, or is damaged; the text follows the file's name.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StepLogError(f"cannot be read: {error.strerror}") from error
    return RecordedRun(data, up_to_damage=up_to_damage)
