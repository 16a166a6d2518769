"""Copies of the store of responses in a database, beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from llmstack_server.apis.responses.response_table import Change, ResponseTable
from llmstack_server.apis.responses.store import StoredResponse
from llmstack_server.state.state_folder import DatabaseReplacedError, cause_of
from llmstack_server.web.errors import HTTPError, storage_unavailable
from llmstack_server.web.sse import encode_json

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 4 << 20
MAX_BATCH_CHANGES = 256
RETRY_S = 1.0
# At the end of the server a disk that does not answer must not hold it.
CLOSE_TIMEOUT_S = 5.0


class ResponseSaver:
    """Follows a store, and writes its changes to a database; satisfies `StoreObserver`.

    Only the names of changed responses wait here, so that what waits is bounded by the store. One thread writes. While
    the disk is full the store goes on in memory, new responses are refused, and the writer tries again every second.

    Attributes:
        failure: Why the last attempt to write has failed, as the end of a sentence; empty where it has not.
        all_stored: All responses of the store.
    """

    def __init__(self, table: ResponseTable, clock: Callable[[], float] = time.monotonic) -> None:
        self.failure = ""
        self.all_stored: Callable[[], list[StoredResponse]] = list
        self._table = table
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, "responses-database")
        self._dirty: dict[str, StoredResponse | None] = {}
        self._id_to_num_events: dict[str, int] = {}  # of the responses that have rows
        self._id_to_num_cut_bytes: dict[str, int] = {}  # of those that have a source
        self._waiting: list[asyncio.Future[bool]] = []
        self._working: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_closed = False

    def note_loaded(self, stored: StoredResponse) -> None:
        """A response of the store has these rows already."""
        self._id_to_num_events[stored.id] = 0 if stored.events is None else len(stored.events)
        if stored.source is not None:
            self._id_to_num_cut_bytes[stored.id] = stored.source.num_bytes

    def forget_loaded(self) -> None:
        """Drops the changes so far, but no removals: the responses were read from the database."""
        self._dirty = {response_id: stored for response_id, stored in self._dirty.items() if stored is None}

    def on_change(self, stored: StoredResponse) -> None:
        """A response was added, has further events, or has ended."""
        self._dirty[stored.id] = stored
        self._start()

    def on_removal(self, stored: StoredResponse) -> None:
        """A response was removed; its rows go, too."""
        if stored.events is not None:  # nothing will write them
            stored.events.release()
        self._dirty[stored.id] = None
        self._start()

    def check(self) -> None:
        """Returns if responses can be stored.

        Raises:
            HTTPError: 503, the last attempt to write has failed.
        """
        if self.failure:
            raise HTTPError(storage_unavailable(self.failure))

    async def saved(self) -> bool:
        """Waits until all changes so far are in the database; False if they could not be written now."""
        if self._is_closed:
            return False
        if not self._dirty and self._working is None:
            return True
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._start()
        return await waiting

    async def close(self) -> None:
        """Writes what is left, as far as that goes, and closes the database."""
        self._is_closing = True
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.saved()
                if self._working is not None:
                    await asyncio.wait((self._working,))
                await asyncio.get_running_loop().run_in_executor(self._writer, self._table.close)
        except TimeoutError:
            logger.error("the stored responses could not be written within %g s", CLOSE_TIMEOUT_S)
        self._is_closed = True
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        if self._working is None and not self._is_closed:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:  # before the event loop; the next change starts it
                return
            self._working = loop.create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._dirty or self._waiting or self.failure:
                waiting, self._waiting = self._waiting, []
                is_written = await self._write_all()
                for future in waiting:
                    if not future.done():
                        future.set_result(is_written)
                if not is_written:
                    if self._is_closing:
                        return
                    await asyncio.sleep(RETRY_S)
        finally:
            self._working = None

    async def _write_all(self) -> bool:
        """Writes what has changed until now; False where that failed. Changes that failed wait again."""
        try:
            await self._write_dirty()
            if self.failure:  # what could not be written was given up: is there room now?
                await self._run(self._table.probe)
                self._note_success()
        except DatabaseReplacedError:
            self._begin_again()
            return await self._write_all()
        except Exception as error:  # noqa: BLE001 (whatever it is, those that wait must know)
            self._note_failure(error)
            return False
        return True

    async def _write_dirty(self) -> None:
        left = deque(self._dirty)
        while batch := self._next_batch(left):
            changes = [change for change, _ in batch.values()]
            try:
                await self._run(partial(self._table.write, changes))
            except Exception:
                self._dirty = {response_id: stored for response_id, (_, stored) in batch.items()} | self._dirty
                raise
            self._note_written(changes)
            self._note_success()

    async def _run(self, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, call)

    def _begin_again(self) -> None:
        """The database is empty: everything is written again."""
        logger.warning("the folder of the stored responses is a new one: all that are in memory are written again")
        self._id_to_num_events.clear()
        self._id_to_num_cut_bytes.clear()
        self._dirty = {stored.id: stored for stored in self.all_stored()}

    def _next_batch(self, left: deque[str]) -> dict[str, tuple[Change, StoredResponse | None]]:
        """Takes changes from the front of `left` that fit into one transaction, and what they were made of."""
        batch: dict[str, tuple[Change, StoredResponse | None]] = {}
        num_bytes = 0
        while left and num_bytes < MAX_BATCH_BYTES and len(batch) < MAX_BATCH_CHANGES:
            response_id = left.popleft()
            if response_id not in self._dirty:
                continue
            stored = self._dirty.pop(response_id)
            if stored is None and response_id not in self._id_to_num_events:
                continue  # it was never written
            change = self._change(response_id, stored)
            num_bytes += change.num_bytes
            batch[response_id] = change, stored
        return batch

    def _change(self, response_id: str, stored: StoredResponse | None) -> Change:
        if stored is None:
            return Change(response_id, None)
        first_event = self._id_to_num_events.get(response_id)
        is_new, first_event = first_event is None, first_event or 0
        ended_at = None if stored.ended_s is None else time.time() - (self._clock() - stored.ended_s)
        events = () if stored.events is None else tuple(stored.events.since(first_event))
        drawn, start, cuts, source = "", self._id_to_num_cut_bytes.get(response_id, 0), b"", stored.source
        if source is not None:
            drawn, cuts = encode_json(source.values), source.cuts_after(start)
        return Change(
            response_id, stored, ended_at, stored.data, stored.journal, stored.output_items, is_new, first_event,
            events, drawn, start, cuts,
        )  # fmt: skip

    def _note_written(self, changes: list[Change]) -> None:
        for change in changes:
            if change.stored is None:
                del self._id_to_num_events[change.response_id]
                self._id_to_num_cut_bytes.pop(change.response_id, None)
                continue
            num_events = change.first_event + len(change.events)
            self._id_to_num_events[change.response_id] = num_events
            if change.drawn:
                self._id_to_num_cut_bytes[change.response_id] = change.cut_start + len(change.cuts)
            if change.stored.events is not None:
                change.stored.events.reveal(num_events)

    def _note_failure(self, error: Exception) -> None:
        if not self.failure:
            logger.error("responses cannot be stored (%s): they are refused until they can", error)
        self.failure = cause_of(error)

    def _note_success(self) -> None:
        if self.failure:
            logger.warning("responses can be stored again")
        self.failure = ""
