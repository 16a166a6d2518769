"""Copies of resumable answers in a database."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.kept_rows import Change, KeptAnswer, KeptRows, Written
from llmstack_server.state.state_folder import DatabaseReplacedError
from llmstack_server.state.stream_record import StreamRecord
from llmstack_server.state.stream_rows import KeptRequest, StreamRow, encoded_stream
from llmstack_server.state.write_behind import WriteBehind

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
MAX_ALL_BODY_BYTES = 64 << 20
MAX_PART_BYTES = 256 << 10


@dataclass
class _Kept:
    """An answer that is kept, and what it is made of."""

    record: StreamRecord
    request: KeptRequest
    source: AnswerSource


class StreamSaver(WriteBehind[_Kept]):
    """Follows a table of streams; satisfies `StreamObserver`.

    Readers of a record get what is in the database, so that the next server knows all that they have seen. A stream
    whose rows cannot be written goes on in memory alone.
    """

    def __init__(self, rows: KeptRows) -> None:
        super().__init__(rows, "resumable streams")
        self._num_body_bytes = 0

    def keep(self, record: StreamRecord, request: KeptRequest, source: AnswerSource) -> bool:
        """Begins to keep an answer; False where its request is too large, or there are too many."""
        size = len(request.body)
        if self._is_closing or size > MAX_BODY_BYTES or self._num_body_bytes + size > MAX_ALL_BODY_BYTES:
            return False
        self._add(_Kept(record, request, source))
        self.on_change(record)
        return True

    def restore(self, record: StreamRecord, row: StreamRow) -> None:
        """An answer came from the database."""
        self._written[record.id] = row.written
        self._add(_Kept(record, row.request, row.source))
        record.reveal(len(row.parts))

    def delete(self, stream_id: str) -> None:
        """An answer in the database is not restored; its rows go."""
        self._written[stream_id] = Written()
        self._note(stream_id)

    def note_resume(self, record: StreamRecord) -> None:
        """Another server begins the answer again."""
        kept = self._kept.get(record.id)
        if kept is not None:
            kept.request = replace(kept.request, num_resumes=kept.request.num_resumes + 1)
            self.on_change(record)

    def on_change(self, record: StreamRecord) -> None:
        """An answer has further parts, or has ended."""
        if record.id in self._kept and not self._is_closing:  # later changes are those of a server that ends
            self._note(record.id)

    def on_removal(self, record: StreamRecord) -> None:
        """An answer has left the table, or is not to be kept any longer; its rows go, too."""
        if record.id in self._kept and not self._is_closing:
            self._drop([record.id])
            self._note(record.id)

    def _add(self, kept: _Kept) -> None:
        self._kept[kept.record.id] = kept
        self._num_body_bytes += len(kept.request.body)
        kept.record.hold()

    def _drop(self, stream_ids: Iterable[str]) -> None:
        for stream_id in stream_ids:
            kept = self._kept.pop(stream_id, None)
            if kept is not None:
                self._num_body_bytes -= len(kept.request.body)
                kept.record.release()

    def _encoded(self, kept: _Kept, written: Written | None) -> KeptAnswer:
        record, first = kept.record, 0 if written is None else max(written.num_parts, 0)
        parts = record.parts_after(first, MAX_PART_BYTES)
        is_over = record.is_over and first + len(parts) >= record.num_parts
        ended_at = time.time() if is_over else None
        return encoded_stream(record, kept.request, kept.source, ended_at=ended_at, parts=parts)

    def _note_written(self, kept: _Kept, written: Written) -> None:
        if written.num_parts < kept.record.num_parts:
            self._dirty[kept.record.id] = None
        kept.record.reveal(written.num_parts)

    def _note_failure(self, changes: Sequence[Change], error: Exception) -> None:
        """Lets the answers go on in memory: a row that ends too early would be resumed at a wrong place."""
        logger.error("%d resumable streams cannot be kept (%s): a restart ends them", len(changes), error)
        for change in changes:
            self._drop([change.id])
            self._written.pop(change.id, None)
            self._dirty.pop(change.id, None)

    def _begin_again(self) -> None:
        logger.error("%d resumable streams cannot be kept (%s)", len(self._kept), DatabaseReplacedError.__name__)
        self._drop(list(self._kept))
        self._dirty.clear()
