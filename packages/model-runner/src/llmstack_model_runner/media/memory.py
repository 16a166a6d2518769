"""Bytes of a media item: in its message, or in memory of another process."""

from __future__ import annotations

import os
import stat

from llmstack_types import MediaItem
from llmstack_types.media import memory_name


class MediaUnreadableError(Exception):
    """An item's bytes are not there, or not as many as it says."""


def read_memory(item: MediaItem) -> bytearray:
    """A copy of the item's bytes.

    A file is read and not mapped: if it became shorter meanwhile, a mapping would end the process.

    Raises:
        MediaUnreadableError: There is no memory, it has another size, or is another item's.
    """
    memory = item.memory
    if memory is None:
        raise MediaUnreadableError("it came without its bytes")
    if not memory.path:
        if len(memory.data) != memory.num_bytes:
            raise MediaUnreadableError(f"it has {len(memory.data)} bytes and not {memory.num_bytes}")
        return bytearray(memory.data)
    try:
        # A pipe would wait for a writer.
        file = os.open(memory.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise MediaUnreadableError(f"its file cannot be opened: {error}") from error
    try:
        _check_name(file, item)
        return _read_file(file, memory.num_bytes)
    except OSError as error:
        raise MediaUnreadableError(f"its file cannot be read: {error}") from error
    finally:
        os.close(file)


def _check_name(file: int, item: MediaItem) -> None:
    """A request that was ended meanwhile has closed its memory, whose number may be that of another picture now."""
    if item.memory is None or not item.memory.path.startswith("/proc/"):
        return
    name = os.readlink(f"/proc/self/fd/{file}").removesuffix(" (deleted)")
    if name != f"/memfd:{memory_name(item.digest)}":
        raise MediaUnreadableError("its memory is closed, and its number that of something else")


def _read_file(file: int, num_bytes: int) -> bytearray:
    found = os.fstat(file)
    # The size is checked before there is memory for it.
    if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
        raise MediaUnreadableError(f"it is no file, or one of {found.st_size} bytes and not {num_bytes}")
    data = bytearray(num_bytes)
    place, view = 0, memoryview(data)
    while place < num_bytes:
        count = os.preadv(file, [view[place:]], place)
        if not count:
            raise MediaUnreadableError(f"its file has become shorter than {num_bytes} bytes")
        place += count
    return data
