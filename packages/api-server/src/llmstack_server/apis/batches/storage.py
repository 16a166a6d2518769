"""Files of clients on disk, with a share for each API key."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from llmstack_server.apis.batches.table import BatchTable, StoredFile
from llmstack_server.options.errors import ServeError
from llmstack_server.options.http_options import BatchConfig
from llmstack_server.state.state_folder import cause_of, is_storage_error
from llmstack_server.web.errors import HTTPError, storage_unavailable

UPLOAD_PREFIX = ".upload-"
_ABANDONED_AFTER_S = 3600
# Work on the lines of one batch; then another one has its turn.
SLICE_S = 0.02
Value = TypeVar("Value")


class FileStore:
    """The files and the table of one server.

    Calls that touch the disk run in one thread, and work on the lines of batches, which may take long, in another one.
    """

    def __init__(self, folder: Path, config: BatchConfig, secret: bytes = b"") -> None:
        """Opens the folder, or makes it.

        Raises:
            ServeError: It cannot be used; the text is one sentence.
        """
        self.folder = folder / "files"
        self.config = config
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _remove_abandoned(self.folder)
        except OSError as error:
            raise ServeError(f"--state-dir {folder}: files cannot be kept: {error.strerror}") from None
        self.table = BatchTable(folder / "batches.sqlite3", secret)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._lines_thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._marks = BatchTable(folder / "batches.sqlite3", secret)  # the same file, for that thread
        self._owner_to_num_coming: Counter[str] = Counter()

    async def run(self, call: Callable[[], Value]) -> Value:
        """The result of a call in the store's thread.

        Raises:
            HTTPError: 503, while the folder cannot be read or written.
        """
        return await self._run_in(self._thread, self.table, call)

    async def work(self, batch_id: str, steps: Generator[object, None, Value]) -> Value:
        """The result of work on the lines of a batch. Batches take turns, and the table says whose lines are read.

        Raises:
            HTTPError: 503, while the folder cannot be read or written.
        """
        while (done := await self._advance_in_turn(batch_id, steps)) is None:
            pass
        return done[0]

    async def _advance_in_turn(self, batch_id: str, steps: Generator[object, None, Value]) -> tuple[Value] | None:
        return await self._run_in(self._lines_thread, self._marks, lambda: self._advance(batch_id, steps))

    def _advance(self, batch_id: str, steps: Generator[object, None, Value]) -> tuple[Value] | None:
        """Runs some steps; the result once they are done."""
        end_s = time.monotonic() + SLICE_S
        self._marks.note_reading(batch_id, True)
        try:
            while True:
                next(steps)
                if time.monotonic() >= end_s:
                    return None
        except StopIteration as end:
            return (end.value,)
        finally:
            self._marks.note_reading(batch_id, False)

    async def _run_in(self, thread: ThreadPoolExecutor, table: BatchTable, call: Callable[[], Value]) -> Value:
        def checked() -> Value:
            if not table.check():
                self.folder.mkdir(mode=0o700, exist_ok=True)
            return call()

        try:
            return await asyncio.get_running_loop().run_in_executor(thread, checked)
        except Exception as error:  # the call may raise anything; the store says what is its own
            if is_storage_error(error):
                raise HTTPError(storage_unavailable(cause_of(error), "Files and batches")) from error
            raise

    async def close(self) -> None:
        """Closes the table, after the calls that wait."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._lines_thread, self._marks.close)
        await loop.run_in_executor(self._thread, self.table.close)
        self._thread.shutdown(wait=False)
        self._lines_thread.shutdown(wait=False)

    def path(self, name: str) -> Path:
        """The path of the file with this id."""
        return self.folder / name

    async def paths(self, file_ids: Set[str], owner: str) -> dict[str, str]:
        """The path of each file that there is and that belongs to the owner; raises as `run`."""

        def find() -> dict[str, str]:
            return {name: str(self.path(name)) for name in file_ids if self.table.file(name, owner) is not None}

        return await self.run(find)

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Reserves room in the share of an owner for bytes of a file that is coming; `release` ends that.

        Raises:
            InvalidRequestError: There is none.
        """
        self.check_room(owner, num_bytes)
        self._owner_to_num_coming[owner] += num_bytes

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Checks that there is such room; raises as `reserve`."""
        num_coming = self._owner_to_num_coming[owner]
        self.table.check_share(owner, num_coming + num_bytes, self.config.max_storage_bytes)

    def release(self, owner: str, num_bytes: int) -> None:
        """Ends the reservation of so many bytes: the file is there, or does not come."""
        self._owner_to_num_coming[owner] -= num_bytes
        if not self._owner_to_num_coming[owner]:
            del self._owner_to_num_coming[owner]

    def open_upload(self) -> tuple[Path, BinaryIO]:
        """A file under a name of its own, which `keep` makes a client's file."""
        path = self.folder / f"{UPLOAD_PREFIX}{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        return path, os.fdopen(descriptor, "wb")

    def keep(
        self, path: Path, owner: str, filename: str, purpose: str, lifetime_s: int | None = None,
        *, is_counted: bool = False,
    ) -> StoredFile:  # fmt: skip
        """Makes a written file one of a client's; `is_counted`: Its bytes are part of the owner's share already.

        Raises:
            InvalidRequestError: The share of the owner has no room for it.
        """
        now = int(time.time())
        expires_at = None if lifetime_s is None else now + lifetime_s
        name = f"file-{uuid.uuid4().hex}"
        file = StoredFile(name, owner, now, expires_at, path.stat().st_size, filename, purpose)
        path.rename(self.path(name))
        try:
            self.table.add_file(file, None if is_counted else self.config.max_storage_bytes)
        except BaseException:
            self.path(name).unlink(missing_ok=True)
            raise
        return file

    def delete(self, file_id: str) -> None:
        """Removes a file, its row first."""
        self.table.delete_file(file_id)
        self.path(file_id).unlink(missing_ok=True)

    def expire(self) -> None:
        """Removes the files whose time is over."""
        for file_id in self.table.expired_files(int(time.time())):
            self.delete(file_id)


def _remove_abandoned(folder: Path) -> None:
    """Removes parts of uploads that ended with an earlier server."""
    for path in folder.glob(f"{UPLOAD_PREFIX}*"):
        if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
            path.unlink(missing_ok=True)
