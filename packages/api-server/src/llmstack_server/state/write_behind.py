"""Copies of answers in a database, written by a thread beside the event loop."""

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
# What can wait is written together: a transaction for each step costs more than all else of a stream.
MAX_DELAY_S = 0.1
# A write that takes longer is one of a disk that does not answer.
MAX_WRITE_S = 5.0
# At the end of the server a disk that does not answer must not hold it.
CLOSE_TIMEOUT_S = 5.0


Kept = TypeVar("Kept")


class WriteBehind(ABC, Generic[Kept]):
    """Writes the changes of answers in memory to a database, by one thread.

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
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        self._is_closing = self._is_closed = False

    @abstractmethod
    def on_change(self, kept: Kept) -> None:
        """An answer has begun or ended, or has a further part."""

    @abstractmethod
    def on_removal(self, kept: Kept) -> None:
        """An answer is not kept any longer."""

    @abstractmethod
    def _encoded(self, kept: Kept, written: Written | None) -> KeptAnswer:
        """An answer with its new parts, or with the first of them; `written` is the state of the database."""

    @abstractmethod
    def _note_written(self, kept: Kept, written: Written) -> None:
        """So much of an answer is in the database."""

    @abstractmethod
    def _note_failure(self, answer_ids: Sequence[str], error: Exception) -> None:
        """Answers could not be written; sets `failure` where they are to be tried again, and else forgets them."""

    def _note_slow(self) -> None:
        """A write takes longer than `MAX_WRITE_S`."""

    @abstractmethod
    def _begin_again(self) -> None:
        """Begins with a new, empty database."""

    def _note_success(self) -> None:
        self.failure = ""

    def _note(self, answer_id: str) -> None:
        """An answer has changed, which is written at once."""
        self._dirty[answer_id] = None
        self._is_due = True
        if self._working is None:
            self._start()

    def _note_part(self, answer_id: str, is_awaited: bool) -> None:
        """An answer has a further part; one that no reader awaits is written within `MAX_DELAY_S`."""
        if is_awaited:
            self._note(answer_id)
            return
        self._dirty[answer_id] = None
        if self._working is None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_DELAY_S, self._start)

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
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._working is None and not self._is_closed:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:  # before the event loop; the next change starts it
                return
            self._is_due = True
            self._working = loop.create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._is_due or self._waiting or self.failure:
                self._is_due = False
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
            if self._dirty and not self._is_closing:
                self._note_part(next(iter(self._dirty)), False)

    async def _write_all(self) -> bool:
        """Writes what has changed until now; False where that failed. Changes that failed wait again."""
        left, batch = deque(self._dirty), list[Change]()
        try:
            while batch := self._next_batch(left):
                await self._run(partial(self._rows.write, batch, time.time()))
                self._note_batch(batch)
                self._note_success()
            if self.failure:  # what could not be written was given up: is there room now?
                await self._run(partial(self._rows.probe, time.time()))
                self._note_success()
        except DatabaseReplacedError:
            self._written.clear()
            self._begin_again()
            return await self._write_all()
        except Exception as error:  # noqa: BLE001 (whatever it is, those that wait must know)
            answer_ids = [change.id for change in batch]
            self._dirty, self._is_due = dict.fromkeys(answer_ids) | self._dirty, True
            self._note_failure(answer_ids, error)
        return not self.failure

    async def _run(self, call: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(MAX_WRITE_S, self._note_slow)
        try:
            await loop.run_in_executor(self._writer, call)
        finally:
            timer.cancel()

    def _next_batch(self, left: deque[str]) -> list[Change]:
        """Takes changes from the front of `left` that fit into one transaction."""
        batch, num_bytes, now = list[Change](), 0, time.time()
        while left and num_bytes < MAX_BATCH_BYTES and len(batch) < MAX_BATCH_CHANGES:
            answer_id = left.popleft()
            if answer_id not in self._dirty:
                continue
            del self._dirty[answer_id]
            kept, written = self._kept.get(answer_id), self._written.get(answer_id)
            if kept is None and written is None:  # it was never written
                continue
            answer = None if kept is None else self._encoded(kept, written)
            batch.append(Change(answer_id, answer, written, now))
            num_bytes += batch[-1].num_bytes
        return batch

    def _note_batch(self, batch: Sequence[Change]) -> None:
        for change in batch:
            kept, written = self._kept.get(change.id), change.written
            if written is None:
                self._written.pop(change.id, None)
                continue
            self._written[change.id] = written
            if kept is None:  # given up while it was written
                self._note(change.id)
            else:
                self._note_written(kept, written)
