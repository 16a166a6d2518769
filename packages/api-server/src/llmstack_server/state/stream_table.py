"""The answers of one process that outlive their connections, within limits."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from llmstack_server.state.packed_parts import MAX_FRESH_BYTES
from llmstack_server.state.stream_record import MAX_STREAM_BYTES, StreamRecord

if TYPE_CHECKING:
    from llmstack_server.state.write_behind import WriteBehind

MAX_PER_OWNER = 16
MAX_BYTES = 64 << 20
# What a record costs besides its events that are counted.
RECORD_OVERHEAD = 4096 + MAX_FRESH_BYTES


class StreamTable:
    """Records by id and by key. One leaves when it is too large, unread for too long, or the oldest that is finished.

    One that leaves is only read by the reader that it has; without one it is abandoned.

    Attributes:
        saver: Keeps the records in a database, where there is one.
    """

    def __init__(self, index: int = 0, count: int = 1, on_abandoned: Callable[[], object] = lambda: None) -> None:
        """`index` of `count`: Of this process; ids say which one has the stream.

        `on_abandoned`: Called when an unfinished answer is given up.
        """
        self.index = index
        self.count = count
        self.on_abandoned = on_abandoned
        self.saver: WriteBehind[StreamRecord] | None = None
        self._id_to_record: dict[str, StreamRecord] = {}
        self._key_to_record: dict[str, StreamRecord] = {}
        self._finished: dict[str, StreamRecord] = {}
        self._owner_to_finished: defaultdict[str, dict[str, StreamRecord]] = defaultdict(dict)
        self._id_to_bytes: dict[str, int] = {}
        self._id_to_timer: dict[str, asyncio.TimerHandle] = {}
        self._unpacked: dict[str, StreamRecord] = {}
        self._num_of_owner: Counter[str] = Counter()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._id_to_record)

    def add(self, owner: str, digest: str, keep_s: float, key: str | None = None) -> StreamRecord | None:
        """A new record; None where there is no room, since all others are unfinished."""
        if not self._make_room(owner):
            return None
        return self._put(self._record(self._new_id(), owner, digest, keep_s, key))

    def restore(self, stream_id: str, owner: str, digest: str, keep_s: float, key: str | None) -> StreamRecord | None:
        """A record of an earlier server; None where there is no room. Its time begins with its next change."""
        if not self._make_room(owner):
            return None
        return self._put(self._record(stream_id, owner, digest, keep_s, key))

    def _record(self, stream_id: str, owner: str, digest: str, keep_s: float, key: str | None) -> StreamRecord:
        return StreamRecord(stream_id, owner, digest, key, keep_s, self._on_change, self._on_growth)

    def _make_room(self, owner: str) -> bool:
        while self._num_of_owner[owner] >= MAX_PER_OWNER:
            if not self._evict(self._owner_to_finished[owner]):
                return False
        while self.num_bytes + RECORD_OVERHEAD > MAX_BYTES:
            if not self._pack_first() and not self._evict(self._finished):
                return False
        return True

    def _put(self, record: StreamRecord) -> StreamRecord:
        self._id_to_record[record.id] = record
        if record.key is not None:
            self._key_to_record[record.key] = record
        self._num_of_owner[record.owner] += 1
        self._id_to_bytes[record.id] = 0
        self._count_bytes(record)
        return record

    def get(self, stream_id: str, owner: str) -> StreamRecord | None:
        """The record with this id; None where it is another owner's."""
        record = self._id_to_record.get(stream_id)
        return record if record is not None and record.owner == owner else None

    def with_key(self, key: str) -> StreamRecord | None:
        """The record with this key."""
        return self._key_to_record.get(key)

    @property
    def settled_keys(self) -> list[str]:
        """The keys of the records that this process answers."""
        records = self._key_to_record.items()
        return [key for key, one in records if one.settled.done() and one.settled.result() == self.index]

    def remove(self, record: StreamRecord) -> None:
        """Takes a record out. Its reader reads on; without one it is abandoned. Idempotent."""
        if self._id_to_record.pop(record.id, None) is None:
            return
        if record.key is not None and self._key_to_record.get(record.key) is record:
            del self._key_to_record[record.key]
        self._finished.pop(record.id, None)
        self._owner_to_finished[record.owner].pop(record.id, None)
        self._unpacked.pop(record.id, None)
        self._num_of_owner[record.owner] -= 1
        if not self._num_of_owner[record.owner]:
            del self._num_of_owner[record.owner], self._owner_to_finished[record.owner]
        self.num_bytes -= self._id_to_bytes.pop(record.id)
        self._stop_timer(record)
        record.is_resumable = False
        if self.saver is not None:
            self.saver.on_removal(record)
        self._abandon_unread(record)

    def note(self, record: StreamRecord) -> None:
        """Begins the time without a reader, and counts the bytes, of a record that was restored."""
        self._on_change(record)
        self._on_growth(record)

    def note_finished(self, record: StreamRecord) -> None:
        """Lets a newer record take the place of this one, which is complete. Idempotent."""
        self._finished.setdefault(record.id, record)
        self._owner_to_finished[record.owner].setdefault(record.id, record)

    def _on_change(self, record: StreamRecord) -> None:
        """The state, the readers or the parts of a record have changed."""
        if record.id not in self._id_to_record:
            self._abandon_unread(record)
            return
        if self.saver is not None:
            self.saver.on_change(record)
        if record.is_over:
            self.note_finished(record)
        if record.has_reader:
            self._stop_timer(record)
        elif record.id not in self._id_to_timer:
            timer = asyncio.get_running_loop().call_later(record.keep_s, self.remove, record)
            self._id_to_timer[record.id] = timer

    def _on_growth(self, record: StreamRecord) -> None:
        """A record counts as more bytes."""
        if record.id not in self._id_to_record:
            return
        while (is_too_large := self._count_bytes(record) > MAX_STREAM_BYTES) or self.num_bytes > MAX_BYTES:
            if self._pack(record) if is_too_large else self._pack_first():
                continue
            if is_too_large or not self._evict(self._finished):
                self.remove(record)
                return

    def _count_bytes(self, record: StreamRecord) -> int:
        num_bytes = record.num_bytes
        self.num_bytes += num_bytes + RECORD_OVERHEAD - self._id_to_bytes[record.id]
        self._id_to_bytes[record.id] = num_bytes + RECORD_OVERHEAD
        if record.parts.is_worth_packing:
            self._unpacked[record.id] = record
        return num_bytes

    def _pack_first(self) -> bool:
        """Makes room in the record that could be packed first; False where there is none."""
        record = next(iter(self._unpacked.values()), None)
        return record is not None and self._pack(record)

    def _pack(self, record: StreamRecord) -> bool:
        """Makes room in a record; False where there is nothing to pack."""
        if self._unpacked.pop(record.id, None) is None or not record.parts.is_worth_packing:
            return False
        record.parts.pack()
        self._count_bytes(record)
        return True

    def _evict(self, finished: Mapping[str, StreamRecord]) -> bool:
        """Removes the oldest of these finished records; False where there is none."""
        found = next(iter(finished.values()), None)
        if found is not None:
            self.remove(found)
        return found is not None

    def _abandon_unread(self, record: StreamRecord) -> None:
        if not record.has_reader and not record.abandoned.is_set():
            record.abandon()
            if not record.is_over:
                self.on_abandoned()

    def _stop_timer(self, record: StreamRecord) -> None:
        timer = self._id_to_timer.pop(record.id, None)
        if timer is not None:
            timer.cancel()

    def _new_id(self) -> str:
        while True:
            stream_id = secrets.token_hex(16)
            if int(stream_id, 16) % self.count == self.index:
                return stream_id
