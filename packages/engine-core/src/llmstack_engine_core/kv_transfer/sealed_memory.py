"""Memory without a name, which no process can change any more."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Final
from zlib import crc32

from llmstack_engine_core.kv_transfer.tag import KVTransferError

_SEALS: Final = 2 | 4 | 8  # F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE, which some systems lack


def is_available() -> bool:
    """Whether this system has it."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def filled(num_bytes: int, fill: Callable[[memoryview], None]) -> int:
    """The descriptor of sealed memory."""
    descriptor = os.memfd_create("llmstack-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # or a lack of memory would end the process
        with mmap.mmap(descriptor, num_bytes) as memory, memoryview(memory) as view:
            fill(view)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # an importer could not read what shrinks
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def checked(descriptor: int, num_bytes: int, checksum: object) -> memoryview:
    """The memory of a descriptor, which is closed.

    Raises:
        KVTransferError: It has another size, may still change, or is damaged.
    """
    try:
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if not is_sealed or os.fstat(descriptor).st_size != num_bytes:
            raise KVTransferError("the memory of the export has another size, or may still change")
        # Private: PyTorch reads from writable memory only, and a sealed file cannot be written.
        memory = memoryview(mmap.mmap(descriptor, num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    except OSError as error:
        raise KVTransferError(f"the memory of the export cannot be read: {error}") from error
    finally:
        os.close(descriptor)
    if crc32(memory) != checksum:
        raise KVTransferError("the bytes of the export are damaged")
    return memory


def checksum_of(descriptor: int, num_bytes: int) -> int:
    """The checksum of the memory of a descriptor."""
    with mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        return crc32(memory)
