"""Segments of a log: records up to a checkpoint, whose checksum they have."""

from __future__ import annotations

from typing import NamedTuple

from llmstack_step_log.encoding import read_checkpoint
from llmstack_step_log.errors import StepLogError
from llmstack_step_log.records import Tag


class Record(NamedTuple):
    """One record; `at` is where it begins."""

    at: int
    tag: int
    payload: bytes


class DamagedSegmentError(StepLogError):
    """The checksum of a segment does not agree.

    Attributes:
        end: Where it seems to end.
        is_snapshot: Whether it seems to hold a snapshot alone, which no event depends on.
    """

    def __init__(self, records: list[Record], end: int) -> None:
        super().__init__("a checksum does not agree")
        self.end = end
        self.is_snapshot = [record.tag for record in records] == [Tag.SNAPSHOT, Tag.CHECKPOINT]


def segment_at(data: bytes, position: int, base: int = 0, start: int | None = None) -> tuple[list[Record], int] | None:
    """The records of the segment that begins at `position`, and where it ends; None if the data end before that.

    `base`: Where the data begin in their file, for the places of the records.
    `start`: Where the bytes begin that its checksum is of; None for `position`.

    Raises:
        DamagedSegmentError: Its checksum does not agree.
    """
    records: list[Record] = []
    size = len(data)
    start = position if start is None else start
    while position < size:
        at = position
        tag = data[position]
        length = shift = 0
        while True:
            position += 1
            if position >= size or shift > 63:
                return None
            byte = data[position]
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        position += 1
        end = position + length
        if end > size:
            return None
        payload = data[position:end]
        position = end
        records.append(Record(base + at, tag, payload))
        if tag == Tag.CHECKPOINT:
            try:
                read_checkpoint(payload, data[start:at])
            except StepLogError as error:
                raise DamagedSegmentError(records, end) from error
            return records, end
    return None
