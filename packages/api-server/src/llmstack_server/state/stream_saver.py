"""Copies of resumable answers in a database, beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.state_folder import DatabaseReplacedError
from llmstack_server.state.stream_record import StreamRecord
from llmstack_server.state.stream_rows import Change, KeptRequest, StreamRow, StreamRows

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
MAX_ALL_BODY_BYTES = 64 << 20
MAX_BATCH_BYTES = 4 << 20
MAX_PART_BYTES = 256 << 10
# At the end of the server a disk that does not answer must not hold it.
CLOSE_TIMEOUT_S = 5.0


@dataclass
class _Kept:
    """An answer that is kept, and what of it is in the database; -1 parts before its row is."""

    record: StreamRecord
    request: KeptRequest
    source: AnswerSource
    num_written: int = -1
    num_cut_bytes: int = 0


class StreamSaver:
    """Follows a table of streams, and writes its changes to a database; satisfies `StreamObserver`.

    Readers of a record get what is in the database, so that the next server knows all that they have seen. A stream
    whose rows cannot be written goes on in memory alone.
    """

    def __init__(self, rows: StreamRows) -> None:
        self._rows = rows
        self._writer = ThreadPoolExecutor(1, "streams-database")
        self._kept: dict[str, _Kept] = {}
        self._num_body_bytes = 0
        self._dirty: dict[str, None] = {}
        self._removed: dict[str, None] = {}
        self._working: asyncio.Task[None] | None = None
        self._is_closed = False

    def keep(self, record: StreamRecord, request: KeptRequest, source: AnswerSource) -> bool:
        """Begins to keep an answer; False where its request is too large, or there are too many."""
        size = len(request.body)
        if self._is_closed or size > MAX_BODY_BYTES or self._num_body_bytes + size > MAX_ALL_BODY_BYTES:
            return False
        self._add(_Kept(record, request, source))
        record.hold()
        self.on_change(record)
        return True

    def restore(self, record: StreamRecord, row: StreamRow) -> None:
        """An answer came from the database."""
        self._add(_Kept(record, row.request, row.source, len(row.parts), row.source.num_bytes))
        record.hold()
        record.reveal(len(row.parts))

    def note_resume(self, record: StreamRecord) -> None:
        """Another server begins the answer again."""
        kept = self._kept.get(record.id)
        if kept is not None:
            kept.request = replace(kept.request, num_resumes=kept.request.num_resumes + 1)
            self.on_change(record)

    def forget(self, record: StreamRecord) -> None:
        """The answer is not kept any longer."""
        self.on_removal(record)

    def on_change(self, record: StreamRecord) -> None:
        """An answer has further parts, or has ended."""
        if record.id in self._kept and not self._is_closed:
            self._dirty[record.id] = None
            self._start()

    def on_removal(self, record: StreamRecord) -> None:
        """An answer has left the table; its rows go, too."""
        if self._is_closed:
            return
        if self._drop(record.id):
            self._removed[record.id] = None
            self._start()

    async def saved(self) -> None:
        """Waits until no change waits."""
        while self._working is not None:
            await asyncio.shield(self._working)

    async def close(self) -> None:
        """Writes what is left, as far as that goes; later changes are those of a server that ends."""
        self._is_closed = True
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.saved()
                await asyncio.get_running_loop().run_in_executor(self._writer, self._rows.close)
        except TimeoutError:
            logger.error("the resumable streams could not be written within %g s", CLOSE_TIMEOUT_S)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _add(self, kept: _Kept) -> None:
        self._kept[kept.record.id] = kept
        self._num_body_bytes += len(kept.request.body)

    def _drop(self, stream_id: str) -> bool:
        """Forgets an answer; whether it had been kept."""
        kept = self._kept.pop(stream_id, None)
        self._dirty.pop(stream_id, None)
        if kept is None:
            return False
        self._num_body_bytes -= len(kept.request.body)
        kept.record.release()
        return True

    def _start(self) -> None:
        if self._working is None:
            self._working = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._dirty or self._removed:
                removed = list(self._removed)
                changes = [Change(stream_id, None) for stream_id in removed] + self._next_batch()
                self._removed.clear()
                try:
                    write = asyncio.get_running_loop().run_in_executor(
                        self._writer, self._rows.write, changes, time.time()
                    )
                    await write
                except Exception as error:  # noqa: BLE001 (whatever it is, readers must not wait for it)
                    self._note_failure(changes, error)
                else:
                    self._note_written(changes)
        finally:
            self._working = None

    def _next_batch(self) -> list[Change]:
        changes = []
        num_bytes = 0
        while self._dirty and num_bytes < MAX_BATCH_BYTES:
            stream_id = next(iter(self._dirty))
            del self._dirty[stream_id]
            change = self._change(self._kept[stream_id])
            num_bytes += sum(map(len, change.parts))
            changes.append(change)
        return changes

    def _change(self, kept: _Kept) -> Change:
        record, source, first = kept.record, kept.source, max(kept.num_written, 0)
        parts = tuple(record.parts_after(first, MAX_PART_BYTES))
        is_over = record.is_over and first + len(parts) >= record.num_parts
        row = StreamRow(
            record.id, record.owner, record.digest, record.key, record.keep_s, kept.request, record.head, is_over,
            source,
        )  # fmt: skip
        cuts = source.cuts_after(kept.num_cut_bytes)
        return Change(record.id, row, kept.num_written < 0, first, parts, kept.num_cut_bytes, cuts)

    def _note_written(self, changes: list[Change]) -> None:
        for change in changes:
            kept = self._kept.get(change.stream_id)
            if kept is None or change.row is None:
                continue
            kept.num_written = change.first + len(change.parts)
            kept.num_cut_bytes = change.cut_start + len(change.cuts)
            if kept.num_written < kept.record.num_parts:
                self._dirty[change.stream_id] = None
            kept.record.reveal(kept.num_written)

    def _note_failure(self, changes: list[Change], error: Exception) -> None:
        """Lets the answers go on in memory: a row that ends too early would be resumed at a wrong place."""
        logger.error("%d resumable streams cannot be kept (%s): a restart ends them", len(changes), error)
        is_empty = isinstance(error, DatabaseReplacedError)  # the rows of all of them are lost
        for stream_id in list(self._kept) if is_empty else [change.stream_id for change in changes]:
            self._drop(stream_id)
