"""Uploads of files, written to the folder of stored ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from llmstack_server.apis.batches.storage import FileStore
from llmstack_server.web.forms import Form, Receive, read_head, receive_form


@dataclass(slots=True)
class Upload:
    """One upload: its form, and the path that its file is written to."""

    form: Form
    path: Path
    file: BinaryIO

    def abandon(self) -> None:
        """Removes what was written, unless it was kept under another name."""
        with suppress(OSError):  # on a full disk `write` has said so
            self.file.close()
        self.path.unlink(missing_ok=True)


@asynccontextmanager
async def receive_upload(
    headers: Mapping[str, str], receive: Receive, store: FileStore, owner: str, timeout_s: float
) -> AsyncIterator[Upload]:
    """The upload of a request, in a file of its own that is removed at the end unless it was kept.

    Its sizes are checked before and while it is read. Until the end the share of the owner has room for it.

    Raises:
        HTTPError: No form, too large, too slow, or the disk cannot be written.
        InvalidRequestError: The form is damaged, or the owner has no room for it.
        ClientDisconnected: The client has disconnected.
    """
    max_bytes = store.config.max_file_bytes
    boundary, num_declared = read_head(headers, max_bytes)
    await store.run(lambda: store.check_room(owner, num_declared))
    path, file = await store.run(store.open_upload)
    upload = Upload(Form(boundary, file, max_bytes, partial(store.reserve, owner)), path, file)
    try:
        await receive_form(receive, upload.form, store.run, timeout_s)
        await store.run(file.close)
        yield upload
    finally:
        await asyncio.shield(store.run(partial(_end_upload, upload, store, owner)))


def _end_upload(upload: Upload, store: FileStore, owner: str) -> None:
    store.release(owner, upload.form.num_bytes)
    upload.abandon()
