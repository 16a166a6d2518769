"""Parts of a log on disk, found and checked without the rest."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llmstack_step_log.encoding import EventDecoder, read_checkpoint
from llmstack_step_log.errors import StepLogError
from llmstack_step_log.header import LogHeader
from llmstack_step_log.packing import pack
from llmstack_step_log.reader import RecordedRun, Run, list_up_to, read_header, read_step_log
from llmstack_step_log.records import Event, Marked, RequestAdded, RequestForked, Tag
from llmstack_step_log.segments import DamagedSegmentError, Record, segment_at
from llmstack_step_log.snapshots import Place, Snapshot, read_place, read_snapshot
from llmstack_types import EngineCoreRequest

_CHUNK_BYTES: Final = 1 << 24
_HEADER_BYTES: Final = 1 << 16
_MAX_PLACE_BYTES: Final = 128
_MAX_LENGTH_BYTES: Final = 10
ANY_SUFFIX: Final = "-" + 32 * "?"
"""In the name of a request to find: a hyphen and 32 characters that are not known."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A snapshot: where its mark and its own record begin."""

    place: Place
    mark_at: int
    record_at: int


class LogFile:
    """A log with snapshots. It reads what is asked for, and checks that; a damaged part harms no other one."""

    def __init__(self, path: str | Path) -> None:
        """Opens the file, and finds its snapshots. O(bytes), about half a second for a gigabyte in memory.

        Raises:
            StepLogError: It cannot be read, or is no log.
        """
        try:
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise StepLogError(f"cannot be read: {error.strerror}") from error
        try:
            self.header, self.start = self._read_header()
            self._found = self._find_snapshots() if self.header.marker else []
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def read(self, start: int, num_bytes: int) -> bytes:
        """The bytes from `start` on, fewer at the end."""
        try:
            return os.pread(self._file, num_bytes, start)
        except OSError as error:
            raise StepLogError(f"cannot be read: {error.strerror}") from error

    @property
    def snapshot_steps(self) -> list[int]:
        """The steps before each snapshot."""
        return [found.place.num_steps for found in self._found]

    @property
    def lacks_beginning(self) -> bool:
        """Whether its first steps were no longer kept."""
        return self.read(self.start, 1) == bytes([Tag.GAP])

    def state_digest(self, num_steps: int) -> bytes | None:
        """The hash of the state in the snapshot after so many steps, if there is one."""
        return next((one.place.state_digest for one in self._found if one.place.num_steps == num_steps), None)

    def part_at(self, num_steps: int) -> RunPart:
        """The run from a snapshot on.

        Raises:
            StepLogError: The snapshot is damaged, or none.
        """
        found = next((one for one in self._found if one.place.num_steps == num_steps), None)
        if found is None:
            raise StepLogError(f"has no snapshot at step {num_steps}")
        return RunPart(self, self._load(found), found.mark_at)

    def part_with(self, request_ids: Sequence[str], num_steps_before: int) -> RunPart | None:
        """The run from a snapshot before the arrival of one of the requests, with so many steps between, if possible.

        None: The log has no such request.
        """
        offset = self._find_request(request_ids)
        if offset is None:
            return None
        order = [found for found in reversed(self._found) if found.mark_at <= offset]
        if len(order) > 1 and self._num_steps_between(order[0].mark_at, offset) < num_steps_before:
            order = [*order[1:], order[0]]
        return self._first_whole(order)

    def has_request(self, request_ids: Sequence[str]) -> bool:
        """Whether one of the requests came in it, be it behind damage. O(bytes)."""
        return self._find_request(request_ids) is not None

    def steps_before_damage(self) -> int | None:
        """Steps before the first part that is lost, damaged or not written yet; None: all of it is whole. O(bytes).

        A damaged snapshot loses no step.
        """
        part, last = RunPart(self, None, self.start), None
        for _, records in part.segments():
            last = read_checkpoint(records[-1].payload)
        if last is None:
            return 0
        return None if last.is_closed and part.truncated_at is None else last.num_steps

    def part_from(self, num_steps: int) -> RunPart:
        """The run from the last snapshot on that is whole and has so many steps before it at most; or all of it.

        Where the log lacks its beginning, the first snapshot stands for that.
        """
        order = [one for one in reversed(self._found) if one.place.num_steps <= num_steps]
        if self.lacks_beginning:
            order += [one for one in self._found if one.place.num_steps > num_steps]
        return self._first_whole(order)

    def _first_whole(self, order: Sequence[_Found]) -> RunPart:
        notes = []
        for found in order:
            try:
                part = RunPart(self, self._load(found), found.mark_at)
                break
            except StepLogError:
                notes.append(f"The snapshot at step {found.place.num_steps} is damaged: an earlier one is used.")
        else:
            part = RunPart(self, None, self.start)
        part.notes += notes
        return part

    def requests_before(self, offset: int, max_requests: int) -> tuple[list[EngineCoreRequest], bool]:
        """The last requests that came before a place of the file, oldest first, and whether these are all.

        A damaged part ends the search.
        """
        ends = [self.start, *(found.mark_at for found in self._found if self.start < found.mark_at < offset), offset]
        requests: deque[EngineCoreRequest] = deque()
        for start, end in zip(reversed(ends[:-1]), reversed(ends[1:]), strict=True):
            part = RunPart(self, None, start)
            came = list(part.requests(end))
            requests.extendleft(reversed(came))
            if len(requests) > max_requests:
                while len(requests) > max_requests:
                    requests.popleft()
                return list(requests), False
            if part.truncated_at is not None:
                return list(requests), False
        return list(requests), True

    def _read_header(self) -> tuple[LogHeader, int]:
        """The header, and where its segment ends."""
        beginning = self.read(0, _HEADER_BYTES)
        header, end = read_header(beginning)
        try:
            found = segment_at(beginning, end, start=0)
        except StepLogError:
            found = None
        if found is None:
            raise StepLogError("is truncated or damaged in its header")
        return header, found[1]

    def _load(self, found: _Found) -> Snapshot:
        records = next(RunPart(self, None, found.record_at).segments(), (0, []))[1]
        if not records or records[0].at != found.record_at or records[0].tag != Tag.SNAPSHOT:
            raise StepLogError("a snapshot is damaged")
        return read_snapshot(records[0].payload)

    def _find_snapshots(self) -> list[_Found]:
        """All snapshots with their marks, in the order of their steps."""
        marks: dict[int, int] = {}
        snapshots: dict[int, tuple[Place, int]] = {}
        for position in self._positions(self.header.marker):
            before = self.read(position - _MAX_LENGTH_BYTES - 1, _MAX_LENGTH_BYTES + 1)
            payload = self.read(position, _MAX_PLACE_BYTES)
            length = 1
            while length < _MAX_LENGTH_BYTES and before[-length - 1] & 0x80:
                length += 1
            record_at, tag = position - length - 1, before[-length - 1]
            with suppress(StepLogError):
                if tag == Tag.MARK:
                    marked = EventDecoder().decode(tag, payload)
                    if isinstance(marked, Marked):
                        marks[marked.num_steps] = record_at
                elif tag == Tag.SNAPSHOT:
                    place, _ = read_place(payload)
                    snapshots[place.num_steps] = place, record_at
        return [
            _Found(place, marks[num_steps], record_at)
            for num_steps, (place, record_at) in sorted(snapshots.items())
            if num_steps in marks
        ]

    def _find_request(self, request_ids: Sequence[str]) -> int | None:
        patterns = list(map(_packed_name, request_ids))
        for start, chunk in self._chunks(max(map(len, patterns))):
            found = [position for position in map(chunk.find, patterns) if position >= 0]
            if found:
                return start + min(found)
        return None

    def _num_steps_between(self, start: int, end: int) -> int:
        num_steps = 0
        for at, records in RunPart(self, None, start).segments():
            num_steps += sum(record.tag == Tag.SCHEDULE and record.at < end for record in records)
            if at >= end:
                break
        return num_steps

    def _positions(self, pattern: bytes) -> Iterator[int]:
        """The positions of some bytes after the header."""
        for start, chunk in self._chunks(len(pattern)):
            position = chunk.find(pattern)
            while position >= 0:
                yield start + position
                position = chunk.find(pattern, position + 1)

    def _chunks(self, num_bytes: int) -> Iterator[tuple[int, bytes]]:
        """The file after its header, so that `num_bytes` bytes in a row are whole in one of the chunks."""
        start = self.start
        while chunk := self.read(start, _CHUNK_BYTES):
            yield start, chunk
            if len(chunk) < num_bytes:
                return
            start += len(chunk) - num_bytes + 1


class RunPart:
    """A run from one of its snapshots on, or from its beginning.

    Attributes:
        header: The configuration of the control plane.
        start: The snapshot that its events begin with; None for the beginning of the run.
        truncated_at: Where the last segment began that was not whole, once its events have come so far.
        notes: Sentences about what could not be used.
    """

    def __init__(self, file: LogFile, start: Snapshot | None, offset: int) -> None:
        self.header = file.header
        self.start = start
        self.truncated_at: int | None = None
        self.notes: list[str] = []
        self._file = file
        self._offset = offset

    def events(self) -> Iterator[Event]:
        """Everything up to the last whole segment.

        Raises:
            StepLogError: A record says what these packages do not understand.
        """
        decoder = EventDecoder(0 if self.start is None else self.start.place.last_us)
        for _, records in self.segments():
            for record in records:
                event = decoder.decode(record.tag, record.payload)
                if isinstance(event, Marked):
                    event = Marked(event.num_steps, self._file.state_digest(event.num_steps))
                yield event

    def requests(self, end: int = sys.maxsize) -> Iterator[EngineCoreRequest]:
        """The requests that came before a place of the file. O(records); nothing else is decoded."""
        decoder = EventDecoder()
        for at, records in self.segments():
            for record in records:
                if record.at < end and record.tag in (Tag.ADD, Tag.FORK):
                    event = decoder.decode(record.tag, record.payload)
                    if isinstance(event, RequestAdded | RequestForked):
                        yield event.request
            if at >= end:
                return

    def requests_up_to(self, request_id: str, max_requests: int) -> tuple[list[EngineCoreRequest], bool]:
        """As `RecordedRun.requests_up_to`; those before the snapshot are among them."""
        own, are_all = list_up_to(self.requests(), request_id, max_requests)
        if self.start is None or not own or not are_all or len(own) == max_requests:
            return own, are_all and self.start is None
        earlier, are_all = self._file.requests_before(self._offset, max_requests - len(own))
        return [*earlier, *own], are_all

    def segments(self) -> Iterator[tuple[int, list[Record]]]:
        """The end of each segment and its records, once it is checked; up to the first that is not whole.

        A damaged snapshot is passed over.
        """
        base, buffer, position = self._offset, b"", 0
        while True:
            try:
                found = segment_at(buffer, position, base)
            except DamagedSegmentError as error:
                if error.is_snapshot:
                    position = error.end
                    continue
                self.truncated_at = base + position
                return
            if found is not None:
                records, position = found
                yield base + position, records
                continue
            more = self._file.read(base + len(buffer), max(len(buffer), 1 << 18))
            if not more:
                self.truncated_at = base + position if position < len(buffer) else None
                return
            base, buffer, position = base + position, buffer[position:] + more, 0


def _packed_name(request_id: str) -> bytes:
    """As `pack_request` writes it: the name of the field, then its value; of a value that has `ANY_SUFFIX` a part.

    A value begins with its length, so that the part fits only a name that is as long.
    """
    packed = pack("request_id") + pack(request_id)
    _, mark, unknown = request_id.partition(ANY_SUFFIX)
    return packed[: len(packed) - len(unknown.encode()) - len(mark) + 1] if mark else packed


@contextmanager
def run_with(
    path: str | Path, request_ids: Sequence[str], num_steps_before: int
) -> Iterator[RecordedRun | RunPart | None]:
    """The run of a log as far as it concerns one of the requests; all of it, up to damage, where it has no snapshots.

    `num_steps_before`: Steps that are wanted before the request came.

    None: The log has no such request, which needs no replay.

    Raises:
        StepLogError: It cannot be read, or is no log.
    """
    with closing(LogFile(path)) as file:
        if file.header.marker:
            yield file.part_with(request_ids, num_steps_before)
        elif file.has_request(request_ids):
            yield read_step_log(path, up_to_damage=True)
        else:
            yield None


def steps_before_damage(path: str | Path) -> int | None:
    """Steps before the first part of a log that is lost, damaged or not written yet; None: all of it is whole.

    O(bytes).

    Raises:
        StepLogError: It cannot be read, or is no log.
    """
    with closing(LogFile(path)) as file:
        return file.steps_before_damage()


@contextmanager
def last_steps(path: str | Path, num_steps: int) -> Iterator[Run]:
    """The part of a run from a snapshot on with so many steps behind it; the whole run without one.

    Raises:
        StepLogError: It cannot be read, or is no log.
    """
    with closing(LogFile(path)) as file:
        steps = file.snapshot_steps
        has_start = bool(steps) and (steps[-1] > num_steps or file.lacks_beginning)
        yield file.part_from(steps[-1] - num_steps) if has_start else read_step_log(path)
