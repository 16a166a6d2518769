"""Items of prompts for engine cores of other machines, which open no file here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from llmstack_engine_core.messages.protocol import MAX_CLIENT_FRAME_BYTES
from llmstack_types import EngineCoreRequest, InvalidRequestError, MediaItem, MediaMemory

# The rest of a frame is for the request itself.
MAX_MEDIA_BYTES: Final = MAX_CLIENT_FRAME_BYTES * 3 // 4


def with_media_data(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request with the bytes of its items in place of the files that they are in.

    Raises:
        InvalidRequestError: They are more than one message holds, or a file is gone or has another size.
    """
    num_bytes = sum(item.memory.num_bytes for item in request.media if item.memory is not None)
    if num_bytes > MAX_MEDIA_BYTES:  # before any of them is read
        raise InvalidRequestError(
            f"The items have {num_bytes} bytes; {MAX_MEDIA_BYTES} can be sent to an engine core on another machine.",
            param="media",
            code="image_too_large",
        )
    return replace(request, media=tuple(_with_data(item, index) for index, item in enumerate(request.media)))


def _with_data(item: MediaItem, index: int) -> MediaItem:
    memory = item.memory
    if memory is None or not memory.path:
        return item
    try:
        with Path(memory.path).open("rb") as file:
            data = file.read(memory.num_bytes + 1)
    except OSError as error:
        data = b""
        reason = error.strerror or type(error).__name__
    else:
        reason = f"it has {len(data)} bytes, and not {memory.num_bytes}"
    if len(data) != memory.num_bytes:
        name = f"media[{index}]"
        raise InvalidRequestError(f"The bytes of {name} cannot be read: {reason}.", param=name)
    return replace(item, memory=MediaMemory(len(data), data=data))
