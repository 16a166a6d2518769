"""Copies in a database of what changes in memory, written beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from llmstack_server.state.kept_rows import Change, KeptAnswer, KeptRows, Written
from llmstack_server.state.state_folder import DatabaseReplacedError

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 4 << 20
MAX_BATCH_CHANGES = 256
RETRY_S = 1.0
# At the end of the server a disk that does not answer must not hold it.
CLOSE_TIMEOUT_S = 5.0


Kept = TypeVar("Kept")


class WriteBehind(ABC, Generic[Kept]):
    """Follows answers in memory, and writes what changes to a database. One thread writes.

    Only the ids of what has changed wait here, so that what waits is bounded by what is in memory.

    Attributes:
        failure: Why the last attempt to write has failed, as the end of a sentence; empty where it has not.
    """

    def __init__(self, rows: KeptRows, name: str) -> None:
        """`name`: What is written, for the log."""
        self.failure = ""
        self._rows = rows
        self._name = name
        self._writer = ThreadPoolExecutor(1, f"{name} database")
        self._kept: dict[str, Kept] = {}
        self._written: dict[str, Written] = {}
        self._dirty: dict[str, None] = {}
        self._waiting: list[asyncio.Future[bool]] = []
        self._working: asyncio.Task[None] | None = None
        self._is_closing = self._is_closed = False

    @abstractmethod
    def _encoded(self, kept: Kept, written: Written | None) -> KeptAnswer:
        """An answer with what is not in the database yet, or the first part of that."""

    @abstractmethod
    def _note_written(self, kept: Kept, written: Written) -> None:
        """So much of an answer is in the database."""

    @abstractmethod
    def _note_failure(self, changes: Sequence[Change], error: Exception) -> None:
        """Changes could not be written; sets `failure` where they are to be tried again, and else forgets them."""

    @abstractmethod
    def _begin_again(self) -> None:
        """There is another database, and it is empty."""

    def _note_success(self) -> None:
        self.failure = ""

    def _note(self, answer_id: str) -> None:
        """An answer has changed."""
        self._dirty[answer_id] = None
        self._start()

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
                await self._run(self._rows.close)
        except TimeoutError:
            logger.error("the %s could not be written within %g s", self._name, CLOSE_TIMEOUT_S)
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
        left, changes = deque(self._dirty), list[Change]()
        try:
            while changes := self._next_batch(left):
                await self._run(partial(self._rows.write, changes, time.time()))
                self._note_batch(changes)
                self._note_success()
            if self.failure:  # what could not be written was given up: is there room now?
                await self._run(partial(self._rows.probe, time.time()))
                self._note_success()
        except DatabaseReplacedError:
            self._written.clear()
            self._begin_again()
            return await self._write_all()
        except Exception as error:  # noqa: BLE001 (whatever it is, those that wait must know)
            self._dirty = {change.id: None for change in changes} | self._dirty
            self._note_failure(changes, error)
        return not self.failure

    async def _run(self, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, call)

    def _next_batch(self, left: deque[str]) -> list[Change]:
        """Takes changes from the front of `left` that fit into one transaction."""
        batch: list[Change] = []
        num_bytes = 0
        while left and num_bytes < MAX_BATCH_BYTES and len(batch) < MAX_BATCH_CHANGES:
            answer_id = left.popleft()
            if answer_id not in self._dirty:
                continue
            del self._dirty[answer_id]
            kept, written = self._kept.get(answer_id), self._written.get(answer_id)
            if kept is not None or written is not None:  # else it was never written
                answer = None if kept is None else self._encoded(kept, written)
                batch.append(Change(answer_id, answer, written))
                num_bytes += batch[-1].num_bytes
        return batch

    def _note_batch(self, changes: Sequence[Change]) -> None:
        for change in changes:
            kept, written = self._kept.get(change.id), change.written
            if written is None:
                self._written.pop(change.id, None)
                continue
            self._written[change.id] = written
            if kept is not None:
                self._note_written(kept, written)
