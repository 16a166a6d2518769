"""Reader of step logs: checks every byte, then returns the events in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from llmstack_step_log.encoding import (
    FORMAT_VERSION,
    MAGIC,
    EventDecoder,
    encode_header,
    put_checkpoint,
    put_record,
    read_checkpoint,
)
from llmstack_step_log.errors import StepLogError
from llmstack_step_log.header import LogHeader
from llmstack_step_log.primitives import Cursor
from llmstack_step_log.records import Checkpoint, Event, Marked, RequestAdded, RequestForked, Tag
from llmstack_step_log.snapshots import Snapshot, read_place
from llmstack_types import EngineCoreRequest

Record = tuple[int, int, int, int]
"""A record: where it begins, its tag, where its payload begins, and where that ends."""


_NO_HEADER = "is truncated or damaged in its header"


class RecordedRun:
    """A log in memory, checked.

    Attributes:
        header: The configuration of scheduler and cache.
        is_closed: The run ended in good order; otherwise the process was killed, or goes on.
        last: The last checkpoint: what the log proves.
        truncated_at: Where the last segment begins that is not whole; None where all are.
        start: The snapshot that its events begin with; None for the beginning of the run.
        notes: Sentences about what could not be used.
    """

    start: Snapshot | None = None
    notes: Sequence[str] = ()

    def __init__(self, data: bytes, *, up_to_damage: bool = False) -> None:
        """Checks `data`. `up_to_damage`: Uses what comes before a damaged segment, as before one that is not whole.

        Raises:
            StepLogError: It is no log of this version, or damaged.
        """
        self._data = data
        self._up_to_damage = up_to_damage
        packed_header, self._start = _split_header(data)
        self._state_digests: dict[int, bytes] = {}
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
            event = decoder.decode(tag, self._data[start:end])
            yield event if tag != Tag.MARK else self._with_digest(event)

    def requests_up_to(self, request_id: str, max_requests: int) -> tuple[list[EngineCoreRequest], bool]:
        """A request and those that came before it, `max_requests` at most, and whether these are all."""
        decoder = EventDecoder()
        added = (
            decoder.decode(tag, self._data[start:end])
            for _, tag, start, end in self._records()
            if tag in (Tag.ADD, Tag.FORK) and end <= self._end
        )
        came = (event.request for event in added if isinstance(event, RequestAdded | RequestForked))
        return list_up_to(came, request_id, max_requests)

    def without_snapshots(self) -> bytes:
        """The same log as a run without snapshots would have written it; the hashes are those of this one."""
        segment = encode_header(replace(self.header, marker=b""))
        written = bytearray()
        for _, tag, start, end in self._records():
            if end > self._end:
                break
            payload = self._data[start:end]
            if tag == Tag.CHECKPOINT:
                put_checkpoint(segment, read_checkpoint(payload))
                written += segment
                segment.clear()
            elif tag not in (Tag.MARK, Tag.SNAPSHOT):
                put_record(segment, tag, payload)
        return bytes(written)

    def _with_digest(self, event: Event) -> Event:
        if not isinstance(event, Marked):
            return event
        return Marked(event.num_steps, self._state_digests.get(event.num_steps))

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
            if tag == Tag.SNAPSHOT:
                self._note_snapshot(self._data[start:end])
            elif tag == Tag.CHECKPOINT:
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

    def _note_snapshot(self, payload: bytes) -> None:
        try:
            place, _ = read_place(payload)
        except StepLogError:
            return  # the check of its segment finds that, too
        self._state_digests[place.num_steps] = place.state_digest

    def _end_segment(self, start: int, end: int, payload: bytes) -> Checkpoint:
        try:
            return read_checkpoint(payload, self._data[start:end])
        except StepLogError as error:
            raise StepLogError(f"is damaged between byte {start} and byte {end}") from error


class Run(Protocol):
    """A run from its beginning, or from a snapshot."""

    @property
    def header(self) -> LogHeader:
        """The configuration of scheduler and cache."""
        ...

    @property
    def start(self) -> Snapshot | None:
        """The snapshot that its events begin with; None for the beginning of the run."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about what could not be used."""
        ...

    @property
    def truncated_at(self) -> int | None:
        """The position of the first segment that is not whole, as far as is known."""
        ...

    def events(self) -> Iterator[Event]:
        """Everything that follows, as far as it is whole."""
        ...

    def requests_up_to(self, request_id: str, max_requests: int) -> tuple[list[EngineCoreRequest], bool]:
        """A request and those that came before it, `max_requests` at most, and whether these are all.

        Empty where it never came.
        """
        ...


def list_up_to(
    requests: Iterable[EngineCoreRequest], request_id: str, max_requests: int
) -> tuple[list[EngineCoreRequest], bool]:
    """The requests up to the first one of that id, `max_requests` at most, and whether these are all."""
    listed: deque[EngineCoreRequest] = deque(maxlen=max_requests)
    for number, request in enumerate(requests, 1):
        listed.append(request)
        if request.request_id == request_id:
            return list(listed), number <= max_requests
    return [], False


def read_header(data: bytes) -> tuple[LogHeader, int]:
    """The header at the beginning of a log, and where it ends.

    Raises:
        StepLogError: It is no log of this version.
    """
    packed, end = _split_header(data)
    return LogHeader.unpack(packed), end


def _split_header(data: bytes) -> tuple[bytes, int]:
    if not data.startswith(MAGIC):
        raise StepLogError("is no log of steps")
    if len(data) <= len(MAGIC):
        raise StepLogError(_NO_HEADER)
    version = data[len(MAGIC)]
    if version != FORMAT_VERSION:
        raise StepLogError(f"has format version {version}, and these packages read version {FORMAT_VERSION}")
    cursor = Cursor(data, len(MAGIC) + 1)
    try:
        packed = cursor.take(cursor.take_uint())
    except StepLogError as error:
        raise StepLogError(_NO_HEADER) from error
    return packed, cursor.position


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
