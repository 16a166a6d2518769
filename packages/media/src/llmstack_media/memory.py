"""Memory that one process lets another fill, and that cannot change after that."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from typing import Any, Final, Self

from llmstack_types.media import MediaMemory

# By number, since Python has names for them on Linux only.
_F_ADD_SEALS: Final = 1033
_SHRINK_AND_GROW: Final = 2 | 4
_WRITE_AND_SEAL: Final = 8 | 1


def place_of(descriptor: int) -> dict[str, Any]:
    """The path by which another process of this user opens this open file, and the number that tells it from others."""
    return {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "number": os.fstat(descriptor).st_ino}


def open_place(place: Mapping[str, Any], flags: int) -> int:
    """A descriptor of memory that another process has open, unless that process closed it.

    Raises:
        ValueError: It is closed; nothing waits for it.
        OSError: The process is gone.
    """
    descriptor = os.open(place["path"], flags | os.O_CLOEXEC)
    if os.fstat(descriptor).st_ino != place["number"]:
        os.close(descriptor)
        raise ValueError("what this job reads or fills is closed")
    return descriptor


class SealedMemory:
    """A descriptor of memory with a fixed size, which other processes of this user open by `path`.

    Once it is closed, its descriptor may become that of other memory. So a process that opens the path checks what it
    got: by the inode, as `open_place` does, or by the name, which `os.readlink` of the path shows.
    """

    def __init__(self, num_bytes: int, name: str = "llmstack-media") -> None:
        """Takes the memory, to be filled.

        Raises:
            OSError: There is too little.
        """
        self.num_bytes = num_bytes
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if num_bytes:
                os.posix_fallocate(self._descriptor, 0, num_bytes)  # or a lack of memory would end the process
            fcntl.fcntl(self._descriptor, _F_ADD_SEALS, _SHRINK_AND_GROW)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, data: bytes, name: str = "llmstack-media") -> Self:
        """Sealed memory with these bytes.

        Raises:
            OSError: There is too little memory.
        """
        memory = cls(len(data), name)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(memory._descriptor, memoryview(data)[written:], written)
            memory.seal()
        except BaseException:
            memory.close()
            raise
        return memory

    @property
    def path(self) -> str:
        """The path by which other processes open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def place(self) -> dict[str, Any]:
        """Path and number, as `open_place` takes them."""
        return place_of(self._descriptor)

    def seal(self) -> None:
        """Seals the memory: no process can change it after that, also one that has it open for writing.

        Raises:
            OSError: A process has mapped it for writing.
        """
        fcntl.fcntl(self._descriptor, _F_ADD_SEALS, _WRITE_AND_SEAL)

    def as_media_memory(self) -> MediaMemory:
        """The memory in the form that engine cores read."""
        return MediaMemory(self.num_bytes, path=self.path)

    def close(self) -> None:
        """Frees it, once the processes that have it open close it too. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
