"""Copies of resumable answers in a database."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterable, Sequence

from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.kept_rows import KeptAnswer, KeptRequest, KeptRows, Written
from llmstack_server.state.state_folder import DatabaseReplacedError
from llmstack_server.state.stream_record import StreamRecord
from llmstack_server.state.stream_rows import StreamRow, facts_of
from llmstack_server.state.write_behind import MAX_WRITE_S, RETRY_S, WriteBehind

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
MAX_ALL_BODY_BYTES = 64 << 20


class StreamSaver(WriteBehind[StreamRecord]):
    """Follows a table of streams.

    Readers of a record get what is in the database, so that the next server knows all that they have seen. A stream
    whose rows cannot be written goes on in memory alone. Its rows go once the database can be written: the next server
    would resume it at a place that its readers have passed.
    """

    def __init__(self, rows: KeptRows) -> None:
        super().__init__(rows, "resumable streams")
        self._num_body_bytes = 0
        self._is_slow = False
        self._deletion: asyncio.TimerHandle | None = None

    def keep(self, record: StreamRecord, request: KeptRequest, source: AnswerSource) -> bool:
        """Begins to keep an answer; False where its request is too large, there are too many, or no write ends."""
        size = len(request.body)
        is_refused = self._is_closing or self._is_slow
        if is_refused or size > MAX_BODY_BYTES or self._num_body_bytes + size > MAX_ALL_BODY_BYTES:
            return False
        self._add(record, request, source)
        self.on_change(record)
        return True

    def restore(self, record: StreamRecord, row: StreamRow) -> None:
        """An answer came from the database."""
        self._written[record.id] = row.written
        self._add(record, row.request, row.source)
        row.source.note_written(row.written.num_values, row.written.num_cut_bytes)
        record.reveal(row.answer.num_parts)

    def delete(self, stream_id: str) -> None:
        """An answer in the database is not restored; its rows go."""
        self._written[stream_id] = Written()
        self._note(stream_id)

    def note_resume(self, record: StreamRecord) -> None:
        """Another server begins the answer again."""
        if record.request is not None:
            record.request = record.request.begun_again()
            self._note(record.id)

    def on_change(self, kept: StreamRecord) -> None:
        """An answer has begun, or has ended."""
        if kept.id in self._kept and not self._is_closing:  # later changes are those of a server that ends
            if not kept.is_over:
                self._note_part(kept.id, False)
            elif not self._is_whole(kept):
                self._note(kept.id)

    def on_removal(self, kept: StreamRecord) -> None:
        """An answer has left the table, or is not to be kept any longer; its rows go, too."""
        if kept.id in self._kept and not self._is_closing:
            self._drop([kept.id])
            self._note(kept.id)

    async def close(self) -> None:
        """Writes what is left, as far as that goes, and closes the database."""
        self._delete_rows()
        await super().close()

    def _add(self, record: StreamRecord, request: KeptRequest, source: AnswerSource) -> None:
        self._kept[record.id] = record
        self._num_body_bytes += len(request.body)
        record.request = request
        record.hold(source, self._note_part)

    def _drop(self, stream_ids: Iterable[str]) -> None:
        for stream_id in stream_ids:
            kept = self._kept.pop(stream_id, None)
            if kept is not None:
                self._num_body_bytes -= 0 if kept.request is None else len(kept.request.body)
                kept.release()

    def _encoded(self, kept: StreamRecord, written: Written | None) -> KeptAnswer:
        answer = KeptAnswer(kept.id, kept.owner, facts_of(kept), request=kept.request, source=kept.source)
        answer.num_parts = kept.num_parts if kept.is_stream or kept.is_over else 0
        if kept.is_over:
            kept.ended_at = answer.ended_at = kept.ended_at or time.time()
            if written is None or not written.num_kept_parts:
                answer.parts = kept.parts.after(0, sys.maxsize)
        return answer

    def _note_written(self, kept: StreamRecord, written: Written) -> None:
        if kept.source is not None:
            kept.source.note_written(written.num_values, written.num_cut_bytes)
        kept.reveal(written.num_parts)

    def _note_failure(self, answer_ids: Sequence[str], error: Exception) -> None:
        self._is_slow = False
        self._give_up(answer_ids, str(error))

    def _note_slow(self) -> None:
        self._is_slow = True
        self._give_up(list(self._kept), f"a write takes more than {MAX_WRITE_S:g} s")

    def _note_success(self) -> None:
        super()._note_success()
        self._is_slow = False

    def _give_up(self, answer_ids: Sequence[str], cause: str) -> None:
        """Lets answers go on in memory, unless all of them is in the database."""
        for answer_id in answer_ids:
            self._dirty.pop(answer_id, None)
        kept = [self._kept[answer_id] for answer_id in answer_ids if answer_id in self._kept]
        lost = [one.id for one in kept if not self._is_whole(one)]
        if lost:
            logger.error("%d resumable streams cannot be kept (%s): a restart ends them", len(lost), cause)
        self._drop(lost)
        if self._deletion is None:
            self._deletion = asyncio.get_running_loop().call_later(RETRY_S, self._delete_rows)

    def _is_whole(self, record: StreamRecord) -> bool:
        written = self._written.get(record.id)
        return record.is_over and written is not None and written.num_kept_parts >= record.num_parts

    def _delete_rows(self) -> None:
        """Begins to delete the rows of what was given up."""
        if self._deletion is not None:
            self._deletion.cancel()
            self._deletion = None
        for answer_id in [one for one in self._written if one not in self._kept]:
            self._note(answer_id)

    def _begin_again(self) -> None:
        logger.error("%d resumable streams cannot be kept (%s)", len(self._kept), DatabaseReplacedError.__name__)
        self._drop(list(self._kept))
        self._dirty.clear()
