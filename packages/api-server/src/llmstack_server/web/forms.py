"""Forms with one file (`multipart/form-data`), written to disk as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from llmstack_llm import request_errors
from llmstack_server.web.body import ClientDisconnected
from llmstack_server.web.errors import HTTPError, missing_parameter, request_timeout, request_too_large
from llmstack_server.web.errors import unsupported_media_type as wrong_type
from llmstack_server.web.form_type import MEDIA_TYPE
from llmstack_types import InvalidRequestError

MAX_HEADER_BYTES = 4096
MAX_FILENAME_CHARS = 255
# The parts around the file: boundaries, headers and the other fields.
OTHER_BYTES = 64 << 10
Receive = Callable[[], Awaitable[Any]]
Run = Callable[[Callable[[], None]], Awaitable[None]]
"""Does work with a file in another thread."""


class Form:
    """One form: the fields, and the file that its part `file` is written to.

    Attributes:
        values: Texts of fields by name; a field may come several times.
        filename: The client's name of the file; None before it came.
        num_bytes: The bytes of the file so far.
    """

    def __init__(
        self,
        boundary: bytes,
        file: BinaryIO,
        max_bytes: int,
        reserve: Callable[[int], None] = lambda num_bytes: None,
        *,
        max_parts: int = 16,
        max_field_bytes: int = 1024,
    ) -> None:
        """`reserve` is called before bytes of the file are written; it may refuse them."""
        self.values: dict[str, list[str]] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self._file = file
        self._reserve = reserve
        self._max_parts = max_parts
        self._max_field_bytes = max_field_bytes
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

    @property
    def fields(self) -> dict[str, str]:
        """The last text of each field."""
        return {name: values[-1] for name, values in self.values.items()}

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
        """The form has come; raises InvalidRequestError where it is not complete."""
        try:
            self._parser.finalize()
        except FormParserError as error:
            raise _malformed() from error
        if not self._is_complete:
            raise _malformed()
        if self.filename is None:
            raise missing_parameter("file")
        self._file.flush()

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > self._max_parts:
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
            if self.num_bytes + end - start > self.max_bytes:
                raise HTTPError(request_too_large(self.max_bytes))
            self._reserve(end - start)
            self.num_bytes += end - start
            self._file.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > self._max_field_bytes:
            name = self._name[:64] or "form"
            raise request_errors.string_too_long(name, self._max_field_bytes, len(self._value))

    def _end_part(self) -> None:
        if self._name != "file":
            self.values.setdefault(self._name, []).append(self._value.decode("utf-8", "replace"))

    def _end_form(self) -> None:
        self._is_complete = True


def read_head(headers: Mapping[str, str], max_bytes: int) -> tuple[bytes, int]:
    """The boundary of a form, and at least how many bytes its file has.

    Raises:
        HTTPError: It is no form, or is declared to have a file of more than `max_bytes`.
    """
    media_type, options = parse_options_header(headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if media_type != MEDIA_TYPE.encode() or not 0 < len(boundary) <= 256:
        raise HTTPError(wrong_type(f"Only '{MEDIA_TYPE}' is allowed"))
    declared = headers.get("content-length", "")
    num_declared = int(declared) if declared.isdecimal() and len(declared) <= 18 else 0
    if num_declared > max_bytes + OTHER_BYTES:
        raise HTTPError(request_too_large(max_bytes))
    return boundary, max(num_declared - OTHER_BYTES, 0)


async def receive_form(receive: Receive, form: Form, run: Run, timeout_s: float) -> None:
    """Reads the body of a request into a form, to its end.

    Raises:
        HTTPError: It is too large or too slow, or the disk cannot be written.
        InvalidRequestError: It is damaged, or the owner has no room for it.
        ClientDisconnected: The client has disconnected.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await _receive_all(receive, form, run)
        await run(form.end)
    except TimeoutError:
        raise HTTPError(request_timeout()) from None


async def _receive_all(receive: Receive, form: Form, run: Run) -> None:
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        data = message.get("body", b"")
        num_bytes += len(data)
        if num_bytes > form.max_bytes + OTHER_BYTES:
            raise HTTPError(request_too_large(form.max_bytes))
        await run(partial(form.write, data))
        if not message.get("more_body", False):
            return


def _shown_name(given: str) -> str:
    """A file name without folders and control characters; it is shown, never used as a path."""
    last = given.replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in last if char.isprintable())[:MAX_FILENAME_CHARS] or "file"


def _malformed() -> InvalidRequestError:
    return InvalidRequestError("The body is not a complete form (multipart/form-data).", code="invalid_value")
