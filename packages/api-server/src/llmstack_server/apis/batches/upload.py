"""Uploads as `multipart/form-data`, written to disk as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from llmstack_llm import request_errors
from llmstack_server.apis.batches.storage import FileStore
from llmstack_server.web.body import ClientDisconnected
from llmstack_server.web.errors import HTTPError, missing_parameter, request_timeout, request_too_large
from llmstack_server.web.errors import unsupported_media_type as wrong_type
from llmstack_types import InvalidRequestError

MAX_PARTS = 16
MAX_FIELD_BYTES = 1024
MAX_HEADER_BYTES = 4096
MAX_FILENAME_CHARS = 255
# The parts around the file: boundaries, headers and the other fields.
_OTHER_BYTES = 64 << 10
Receive = Callable[[], Awaitable[Any]]


class Upload:
    """One upload: the fields, and the file that it is written to.

    Attributes:
        fields: Text fields by name.
        filename: The client's name of the file; None before it came.
        path: Where it is written.
        num_bytes: The bytes of the file so far.
    """

    def __init__(
        self, boundary: bytes, path: Path, file: BinaryIO, max_bytes: int, reserve: Callable[[int], None]
    ) -> None:
        """`reserve` is called before bytes of the file are written; it may refuse them."""
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.path = path
        self._file = file
        self._max_bytes = max_bytes
        self._reserve = reserve
        self.num_bytes = 0
        self._num_parts = 0
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._disposition: dict[bytes, bytes] = {}
        self._value = bytearray()
        self._is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end_form,
            },
        )

    def write(self, data: bytes) -> None:
        """Takes the next bytes of the body.

        Raises:
            HTTPError: The file is too large.
            InvalidRequestError: The body is not a form, or the owner has no room for the file.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed() from error

    def end(self) -> None:
        """Closes the file; raises InvalidRequestError where the form is not complete."""
        try:
            self._parser.finalize()
        except FormParserError as error:
            raise _malformed() from error
        finally:
            self._file.close()
        if not self._is_complete:
            raise _malformed()
        if self.filename is None:
            raise missing_parameter("file")

    def abandon(self) -> None:
        """Removes what was written, unless it was kept under another name."""
        with suppress(OSError):  # on a full disk `write` has said so
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed()
        self._disposition, self._value = {}, bytearray()

    def _add_header(self, part: int, data: bytes) -> None:
        self._header[part].extend(data)
        if len(self._header[part]) > MAX_HEADER_BYTES:
            raise _malformed()

    def _end_header(self) -> None:
        name, value = (bytes(part) for part in self._header)
        self._header = (bytearray(), bytearray())
        if name.lower() == b"content-disposition":
            self._disposition = parse_options_header(value)[1]
            if self._name == "file":
                if self.filename is not None:
                    raise request_errors.invalid_value("file", "there is more than one")
                given = self._disposition.get(b"filename", b"file").decode("utf-8", "replace")
                self.filename = _shown_name(given)

    @property
    def _name(self) -> str:
        return self._disposition.get(b"name", b"").decode("utf-8", "replace")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            if self.num_bytes + end - start > self._max_bytes:
                raise HTTPError(request_too_large(self._max_bytes))
            self._reserve(end - start)
            self.num_bytes += end - start
            self._file.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise request_errors.string_too_long(self._name[:64] or "form", MAX_FIELD_BYTES, len(self._value))

    def _end_part(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end_form(self) -> None:
        self._is_complete = True


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
    media_type, options = parse_options_header(headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if media_type != b"multipart/form-data" or not 0 < len(boundary) <= 256:
        raise HTTPError(wrong_type("Only 'multipart/form-data' is allowed"))
    max_bytes, declared = store.config.max_file_bytes, headers.get("content-length", "")
    num_declared = int(declared) if declared.isdecimal() and len(declared) <= 18 else 0
    if num_declared > max_bytes + _OTHER_BYTES:
        raise HTTPError(request_too_large(max_bytes))
    await store.run(lambda: store.check_room(owner, max(num_declared - _OTHER_BYTES, 0)))
    path, file = await store.run(store.open_upload)
    upload = Upload(boundary, path, file, max_bytes, partial(store.reserve, owner))
    try:
        async with asyncio.timeout(timeout_s):
            await _receive_all(receive, upload, store, max_bytes + _OTHER_BYTES)
        await store.run(upload.end)
        yield upload
    except TimeoutError:
        raise HTTPError(request_timeout()) from None
    finally:
        await asyncio.shield(store.run(partial(_end_upload, upload, store, owner)))


def _end_upload(upload: Upload, store: FileStore, owner: str) -> None:
    store.release(owner, upload.num_bytes)
    upload.abandon()


async def _receive_all(receive: Receive, upload: Upload, store: FileStore, max_bytes: int) -> None:
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        data = message.get("body", b"")
        num_bytes += len(data)
        if num_bytes > max_bytes:
            raise HTTPError(request_too_large(store.config.max_file_bytes))
        await store.run(partial(upload.write, data))
        if not message.get("more_body", False):
            return


def _shown_name(given: str) -> str:
    """A file name without folders and control characters; it is shown, never used as a path."""
    last = given.replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in last if char.isprintable())[:MAX_FILENAME_CHARS] or "file"


def _malformed() -> InvalidRequestError:
    return InvalidRequestError("The body is not a complete form (multipart/form-data).", code="invalid_value")
