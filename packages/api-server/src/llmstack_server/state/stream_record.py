"""An answer that outlives its connection: its parts and its readers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.packed_parts import MAX_FRESH_BYTES, MAX_FRESH_PART, PART_OVERHEAD, PackedParts
from llmstack_types.json_values import JSONValue

if TYPE_CHECKING:
    from llmstack_server.state.kept_rows import KeptRequest

MAX_STREAM_BYTES = 1 << 20
MAX_READ_BYTES = 256 << 10

RawHeaders = tuple[tuple[bytes, bytes], ...]
Take = Callable[[int, bytes], bool]
"""Sends a part with its number at once; False where that would wait for the connection."""


class UnknownStreamError(Exception):
    """No stream has this id, or it is another tenant's."""


class StreamAwayError(Exception):
    """The process that has the stream does not answer now."""


class ReplacedError(Exception):
    """A later reader has come to the stream."""


class FailedError(Exception):
    """The answer has failed, and its reader has all parts; `fields` are those of the error."""

    def __init__(self, fields: Mapping[str, JSONValue]) -> None:
        super().__init__(str(fields.get("message", "")))
        self.fields = fields


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an HTTP answer.

    Attributes:
        request_id: The id in the engine; empty for an answer of an earlier server.
    """

    status: int
    headers: RawHeaders
    is_stream: bool
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """The next events of a reader.

    Attributes:
        first: The number of the first event, from 1 on; parts of an answer that is no stream are numbered, too.
        is_last: Whether nothing follows.
        is_resumable: Whether the stream can be read again, as far as that is known now.
    """

    head: Head
    first: int
    parts: list[bytes]
    is_last: bool
    is_resumable: bool


def _ignore(record: StreamRecord) -> None:
    pass


class StreamRecord:
    """One answer and its readers. A stream has one reader, the latest; a whole answer may have several.

    Attributes:
        id: 128 random bits, or the id of a stored response, whose events these are.
        owner: The tenant.
        digest: A digest of the request.
        key: The key of the request in the table; None if it has none.
        keep_s: Seconds that it is kept without a reader.
        is_resumable: Whether a later reader may come. Otherwise parts are dropped when they were read.
        is_over: Whether all parts are there.
        head: The status and the headers, once they are known.
        parts: What it has, for readers and the database.
        latest: The reader after which no other has come.
        num_promised: The parts that readers of an earlier server may have at least; they come again.
        abandoned: Set once no reader has it or can come.
        request, source: Where a database keeps it, from which another server generates it again.
        ended_at: When it ended, by the clock of the world, where a database keeps it.
    """

    def __init__(
        self, stream_id: str, owner: str, digest: str = "", key: str | None = None, keep_s: float = 0.0,
        on_change: Callable[[StreamRecord], None] = _ignore, on_growth: Callable[[StreamRecord], None] = _ignore,
    ) -> None:  # fmt: skip
        """`on_change`, `on_growth`: Called when its state or its readers change, and when it counts as more bytes."""
        self.id = stream_id
        self.owner = owner
        self.digest = digest
        self.key = key
        self.keep_s = keep_s
        self.is_resumable = True
        self.is_over = False
        self.num_promised = 0
        self.abandoned = asyncio.Event()
        self._left: asyncio.Future[None] | None = None
        self._settled: asyncio.Future[int] | None = None
        self.head: Head | None = None
        self._failure: Mapping[str, JSONValue] | None = None
        self.parts = PackedParts()
        self._num_uncounted_bytes = 0
        self._num_saved: int | None = None
        self._readers: set[StreamReader] = set()
        self.latest: StreamReader | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._on_change = on_change
        self._on_growth = on_growth
        self.request: KeptRequest | None = None
        self.source: AnswerSource | None = None
        self.ended_at: float | None = None
        self._on_part: Callable[[str, bool], None] | None = None

    @property
    def left(self) -> asyncio.Future[None]:
        """Done once no reader has it or can come."""
        if self._left is None:
            self._left = asyncio.get_running_loop().create_future()
            if self.abandoned.is_set():
                self._left.set_result(None)
        return self._left

    @property
    def settled(self) -> asyncio.Future[int]:
        """For a record with a key, the index of the process that answers, once the processes agree."""
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        return self._settled

    @property
    def num_parts(self) -> int:
        """The parts so far, dropped ones included."""
        return len(self.parts)

    @property
    def num_visible(self) -> int:
        """The number of parts for readers: without a database all, else the written ones; -1 before the record is."""
        return self.num_parts if self._num_saved is None else min(self._num_saved, self.num_parts)

    @property
    def num_bytes(self) -> int:
        """The size of its parts, as they are now."""
        return self.parts.num_bytes

    @property
    def has_reader(self) -> bool:
        """Whether a reader has it now."""
        return bool(self._readers)

    @property
    def is_stream(self) -> bool:
        """Whether it is known to be a stream."""
        return self.head is not None and self.head.is_stream

    def begin(self, head: Head) -> None:
        """Notes the status and the headers, before all parts."""
        self.head = head
        self._on_change(self)
        self.tell()

    def abandon(self) -> None:
        """Notes that no reader has it or can come. Idempotent."""
        self.abandoned.set()
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    def hold(self, source: AnswerSource | None = None, on_part: Callable[[str, bool], None] | None = None) -> None:
        """Withholds from readers what does not follow from the database yet: the next server would not know of it.

        `source`: Says what follows from the database; without it, nothing does.
        `on_part`: Called with the id when there is a further part, and whether it is withheld.
        """
        self._num_saved = -1
        self.source, self._on_part = source, on_part

    def reveal(self, num_saved: int) -> None:
        """The database knows so many parts, or the sources of them."""
        if self._num_saved is None:
            return
        source = self.source
        follows = source is not None and source.follows and not self.is_over
        num_following = self.num_parts if follows and num_saved > 0 else 0  # the first one waits for its head
        num_saved = self._num_saved = max(num_saved, self._num_saved, num_following)
        reader = self.latest
        is_next = reader is not None and reader.is_waiting and reader.position < num_saved
        if reader is None or not is_next or self.is_over or not self.is_resumable:
            self.tell()
            return
        for part in self.parts.after(reader.position, MAX_READ_BYTES)[: max(num_saved - reader.position, 0)]:
            if not reader.take(reader.position + 1, part):
                self.tell()
                return
            reader.position += 1

    def release(self) -> None:
        """Gives readers everything again, because nothing of it is in a database any more."""
        self._num_saved = self.request = self.source = self._on_part = None
        self.tell()

    def restore(self, head: Head, parts: Sequence[bytes], num_promised: int = 0) -> None:
        """Takes what an earlier server has saved."""
        self.head = head
        self.num_promised = num_promised
        for part in parts:
            self.parts.append(part)
        self.parts.pack()

    async def append(self, part: bytes) -> None:
        """Adds a part. Without later readers it waits until the reader has room for it."""
        while not self.is_resumable and self.num_bytes > MAX_STREAM_BYTES and not self.abandoned.is_set():
            await self._wait()
        self.put(part)

    def put(self, part: bytes, *, is_last: bool = False) -> None:
        """Adds a part at once. The last one is left to the reader."""
        # A reader that waits takes it here: a turn of its task would cost more than all else.
        parts, reader, size = self.parts, self.latest, len(part)
        parts.fresh.append(part)
        parts.num_fresh_bytes += size + PART_OVERHEAD
        self._num_uncounted_bytes += size + PART_OVERHEAD
        if self._num_uncounted_bytes > MAX_FRESH_BYTES or size > MAX_FRESH_PART:
            self._num_uncounted_bytes = 0
            self._on_growth(self)
        number = parts.num_packed + len(parts.fresh)
        if self._num_saved is not None and self._withholds(number, is_last=is_last):
            return
        is_next = reader is not None and reader.is_waiting and reader.position == number - 1
        if reader is None or is_last or not is_next or not self.is_resumable or not reader.take(number, part):
            self.tell()
        else:
            reader.position = number

    def _withholds(self, number: int, *, is_last: bool) -> bool:
        """Whether no reader may have the part with this number yet, which is the last one so far."""
        source, num_saved = self.source, self._num_saved or 0
        if 0 < num_saved == number - 1 and source is not None and source.follows and not is_last:
            num_saved = self._num_saved = number
        if self._on_part is not None:
            self._on_part(self.id, num_saved < number)
        return num_saved < number

    def fail(self, fields: Mapping[str, JSONValue]) -> None:
        """Ends an answer with an error after the parts that readers may have."""
        self._failure = fields
        self.finish()

    def finish(self) -> None:
        """Marks the last part as the end. Idempotent."""
        if not self.is_over:
            self.is_over = True
            self._on_change(self)
            self.tell()

    def open(self, after: int) -> StreamReader:
        """A reader of the parts after the number `after`.

        Raises:
            UnknownStreamError: There is no such part yet.
        """
        num_known = self.num_parts if self.is_over or not self.num_promised else sys.maxsize
        if after > num_known or after < self.parts.num_dropped:
            raise UnknownStreamError
        reader = StreamReader(self, after)
        self._readers.add(reader)
        self.latest = reader
        self._on_change(self)
        self.tell()
        return reader

    def close_reader(self, reader: StreamReader) -> None:
        """Takes a reader away. Idempotent."""
        if reader in self._readers:
            self._readers.discard(reader)
            self._on_change(self)
            self.tell()

    async def read(self, reader: StreamReader, position: int, *, knows_head: bool) -> Batch:
        """The parts after `position`, once there are some, it is over, or the reader learns of the head.

        Raises:
            ReplacedError: Another reader has come.
            FailedError: It has failed before its first part.
            UnknownStreamError: It has ended before there was a part, or before `position`.
        """
        while True:
            if self._failure is not None and position >= self.num_visible:
                raise FailedError(self._failure)
            if reader not in self._readers or (self.is_stream and reader is not self.latest):
                raise ReplacedError
            position = max(position, reader.position)
            head, visible = self.head, self.num_visible
            if head is not None and visible >= 0:
                start = position if head.is_stream else max(position, self.parts.num_dropped)
                if head.is_stream and self.is_over and start > self.num_parts:
                    raise UnknownStreamError  # a reader of an earlier server claims more than there was
                is_complete = self.is_over and self._failure is None and visible >= self.num_parts
                if visible > start or is_complete or not knows_head:
                    return self._batch(head, start)
            elif head is None and self.is_over:
                raise UnknownStreamError  # it was abandoned before it began
            await self._wait()

    def drop_read(self, position: int) -> None:
        """Drops the parts up to `position`, which no reader will ask for again."""
        self.parts.drop(position)
        self.tell()

    def _batch(self, head: Head, start: int) -> Batch:
        parts = self.parts.after(start, MAX_READ_BYTES)[: max(self.num_visible - start, 0)]
        is_last = self.is_over and self._failure is None and start + len(parts) >= self.num_parts
        return Batch(head, start + 1, parts, is_last, self.is_resumable)

    def tell(self) -> None:
        """Wakes all that wait; later ones wait for the next change."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                if not one.done():
                    one.set_result(None)

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter


def _take_none(number: int, part: bytes) -> bool:
    return False


class StreamReader:
    """One reader of a record in this process.

    Attributes:
        position: The parts that it has read.
        is_waiting: Whether it waits for the next part.
        take: Takes a new part where it waits and has read all before; `follow` sets it.
    """

    def __init__(self, record: StreamRecord, position: int) -> None:
        self.record = record
        self.position = position
        self.is_waiting = False
        self.take: Take = _take_none
        self._knows_head = False

    @property
    def stream_id(self) -> str:
        """The id of the stream."""
        return self.record.id

    async def read(self) -> Batch:
        """The next parts; raises as `StreamRecord.read`."""
        self.is_waiting = True
        try:
            batch = await self.read_from(self.position, knows_head=self._knows_head)
        finally:
            self.is_waiting = False
        self.position = batch.first - 1 + len(batch.parts)
        self._knows_head = True
        return batch

    def follow(self, take: Take) -> None:
        """Hands each new part to `take` while `read` waits."""
        self.take = take

    async def read_from(self, position: int, *, knows_head: bool) -> Batch:
        """The parts after `position`, for a reader that has read so far and may ask twice."""
        if not self.record.is_resumable and self.record.latest is self:
            self.record.drop_read(position)
        return await self.record.read(self, position, knows_head=knows_head)

    def close(self) -> None:
        """Takes the reader away from its record. Idempotent."""
        self.take = _take_none
        self.record.close_reader(self)

    async def aclose(self) -> None:
        """Ends the reader, under the name that readers of other processes have."""
        self.close()
