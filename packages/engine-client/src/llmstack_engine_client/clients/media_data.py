"""Items of prompts for engine cores of other machines, which open no file here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from llmstack_engine_core.messages.protocol import MediaBytes
from llmstack_types import EngineCoreRequest, InvalidRequestError, MediaItem, MediaMemory

MAX_MEDIA_BYTES: Final = 128 << 20
"""Of the files of one request. A message to a rank, which has what one step begins to encode, holds twice that."""
PART_BYTES: Final = 8 << 20
"""Of one message, which holds twice that: others go between them."""


def media_messages(request: EngineCoreRequest) -> Iterator[MediaBytes | EngineCoreRequest]:
    """The bytes of the files that a request's items are in, in parts; then the request without these files.

    Raises:
        InvalidRequestError: They are more than can be sent, or a file is gone or has another size.
    """
    num_bytes = sum(item.memory.num_bytes for item in request.media if item.memory is not None and item.memory.path)
    if num_bytes > MAX_MEDIA_BYTES:  # before any of them is read
        raise InvalidRequestError(
            f"The items have {num_bytes} bytes; {MAX_MEDIA_BYTES} can be sent to an engine core on another machine.",
            param="media", code="image_too_large",
        )  # fmt: skip
    for index, item in enumerate(request.media):
        if item.memory is not None and item.memory.path:
            for data in _parts_of(item.memory, f"media[{index}]"):
                yield MediaBytes(request.request_id, data)
    yield replace(request, media=tuple(map(_without_file, request.media)))


def _without_file(item: MediaItem) -> MediaItem:
    memory = item.memory
    return item if memory is None or not memory.path else replace(item, memory=MediaMemory(memory.num_bytes))


def _parts_of(memory: MediaMemory, name: str) -> Iterator[bytes]:
    try:
        with Path(memory.path).open("rb") as file:
            yield from _read(file, memory.num_bytes, name)
    except OSError as error:
        raise _unreadable(name, error.strerror or type(error).__name__) from error


def _read(file: BinaryIO, num_bytes: int, name: str) -> Iterator[bytes]:
    left = num_bytes
    while left:
        data = file.read(min(left, PART_BYTES))
        if not data:
            raise _unreadable(name, f"it has {num_bytes - left} bytes, and not {num_bytes}")
        left -= len(data)
        if not left and file.read(1):
            raise _unreadable(name, f"it has more than {num_bytes} bytes")
        yield data


def _unreadable(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The bytes of {name} cannot be read: {reason}.", param=name)
