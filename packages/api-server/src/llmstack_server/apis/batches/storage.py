"""Files of clients on disk, with a share for each API key."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from llmstack_server.apis.batches.table import BatchTable, StoredFile, is_storage_error
from llmstack_server.options.errors import ServeError
from llmstack_server.options.http_options import BatchConfig
from llmstack_server.web.errors import HTTPError, storage_unavailable
from llmstack_types import InvalidRequestError

MAX_FILES = 10_000
UPLOAD_PREFIX = ".upload-"
_ABANDONED_AFTER_S = 3600
Value = TypeVar("Value")


class FileStore:
    """The files and the table of one server; every call that touches the disk runs in one thread."""

    def __init__(self, folder: Path, config: BatchConfig) -> None:
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
        self.table = BatchTable(folder / "batches.sqlite3")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")

    async def run(self, call: Callable[[], Value]) -> Value:
        """The result of a call in the store's thread.

        Raises:
            HTTPError: 503, while the folder cannot be read or written.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except Exception as error:  # the call may raise anything; the store says what is its own
            if is_storage_error(error):
                raise HTTPError(storage_unavailable()) from error
            raise

    async def close(self) -> None:
        """Closes the table, after the calls that wait."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.table.close)
        self._thread.shutdown(wait=False)

    def path(self, name: str) -> Path:
        """The path of the file with this id."""
        return self.folder / name

    def check_share(self, owner: str, num_bytes: int) -> None:
        """Checks that so many more bytes fit into the share of an owner.

        Raises:
            InvalidRequestError: They do not.
        """
        number, used = self.table.usage(owner)
        if number >= MAX_FILES:
            raise InvalidRequestError(f"At most {MAX_FILES} files are kept; delete some.", code="file_quota_exceeded")
        if used + num_bytes > self.config.max_storage_bytes:
            message = f"The files of one API key may have {self.config.max_storage_bytes} bytes; delete some."
            raise InvalidRequestError(message, code="file_quota_exceeded")

    def open_upload(self) -> tuple[Path, BinaryIO]:
        """A file under a name of its own, which `keep` makes a client's file."""
        path = self.folder / f"{UPLOAD_PREFIX}{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        return path, os.fdopen(descriptor, "wb")

    def keep(self, path: Path, owner: str, filename: str, purpose: str, lifetime_s: int | None = None) -> StoredFile:
        """Makes a written file one of a client's."""
        now = int(time.time())
        expires_at = None if lifetime_s is None else now + lifetime_s
        name = f"file-{uuid.uuid4().hex}"
        file = StoredFile(name, owner, now, expires_at, path.stat().st_size, filename, purpose)
        path.rename(self.path(name))
        try:
            self.table.add_file(file)
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
