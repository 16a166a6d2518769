"""Regions of memory for weights, which may be touched ahead."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref

_HUGE_PAGE_BYTES = 1 << 21
_ALIGNMENT = 4096
REGION_BYTES = 64 << 20
LEAST_S_PER_BYTE = 0.04 / REGION_BYTES
"""From which on touching ahead is worth its time, which the other threads miss: measured 0.01 to 0.02, and 0.1 s for a
region from the host."""


class MemoryRegions:
    """Hands out memory of a region, from its start on; the next region follows when it is used up.

    A region is freed with the last view of it. What is larger than a region has one of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: weakref.ref[mmap.mmap] | None = None  # its users keep it
        self._begin = self._end = 0  # bytes of it that are free
        self._is_touched = False
        self._touched: list[mmap.mmap] = []  # regions that are ready
        self._touched_large: tuple[mmap.mmap, int] | None = None  # one that is larger, and its bytes
        self._num_expected = 0  # further regions that will be asked for
        self._has_ended = False

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """A region, and where `num_bytes` of it begin, which are the caller's; they are aligned to small pages."""
        with self._lock:
            if num_bytes > REGION_BYTES:
                return self._take_large(num_bytes)
            current = None if self._region is None else self._region()
            if current is None or self._begin + num_bytes > self._end:
                if current is not None:
                    self._free_rest(current)
                current = self._next_region()
            start = self._begin
            self._begin += num_bytes + -num_bytes % _ALIGNMENT
            return current, start

    def touch_ahead(self, num_bytes: int, largest: int = 0) -> None:
        """Touches memory that `take` will be asked for; called in a thread of its own, while others may take some.

        The system gives and clears a page at its first touch. A virtual machine that gets it from its host takes longer
        for that than the packing of weights into it. Where a region took little time, no further one is touched.
        `largest`: Bytes that are asked for at once, if they are more than a region; they come first.

        Raises:
            OSError: There is no memory.
        """
        with self._lock:
            self._num_expected = 0 if self._has_ended else num_bytes // REGION_BYTES
        if largest > REGION_BYTES and self._is_expected():
            large, is_slow = _touched_region(largest)
            with self._lock:
                self._num_expected = self._num_expected if is_slow else 0
                if not self._has_ended:
                    self._touched_large = large, largest
        is_slow = True
        while is_slow and self._is_expected():
            region, is_slow = _touched_region(REGION_BYTES)
            with self._lock:
                if self._num_expected > 0:
                    self._num_expected -= 1
                    self._touched.append(region)

    def end_touching(self) -> None:
        """Frees what was touched and is not taken; called when all weights are loaded. No more is touched."""
        with self._lock:
            self._has_ended = True
            self._num_expected = 0
            self._touched.clear()
            self._touched_large = None
            current = None if self._region is None else self._region()
            if current is not None:
                self._free_rest(current)

    def _take_large(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """A region of its own, of which what is touched and not asked for is given back."""
        if self._touched_large is None or self._touched_large[1] < num_bytes:
            region = _new_region(num_bytes)
            return region, _first_byte(region)
        region, size = self._touched_large
        self._touched_large = None
        start = _first_byte(region)
        end = start + num_bytes + -num_bytes % _ALIGNMENT
        if end < start + size:
            region.madvise(mmap.MADV_DONTNEED, end, start + size - end)
        return region, start

    def _is_expected(self) -> bool:
        with self._lock:
            return self._num_expected > 0

    def _next_region(self) -> mmap.mmap:
        """The next region becomes the present one."""
        self._is_touched = bool(self._touched)
        if self._is_touched:
            region = self._touched.pop(0)
        else:
            self._num_expected -= 1
            region = _new_region(REGION_BYTES)
        self._region, self._begin = weakref.ref(region), _first_byte(region)
        self._end = self._begin + REGION_BYTES
        return region

    def _free_rest(self, region: mmap.mmap) -> None:
        """Gives back what is touched and free in the present region; it stays part of the region."""
        start = self._begin + -self._begin % _ALIGNMENT
        if self._is_touched and start < self._end:
            region.madvise(mmap.MADV_DONTNEED, start, self._end - start)
        self._is_touched = False


def _new_region(num_bytes: int) -> mmap.mmap:
    """A region of at least `num_bytes` from its first byte on, in huge pages."""
    num_pages = -(-num_bytes // _HUGE_PAGE_BYTES)
    # One page more, for alignment; pages that are never touched take no memory.
    region = mmap.mmap(-1, (num_pages + 1) * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    return region


def _touched_region(num_bytes: int) -> tuple[mmap.mmap, bool]:
    """The same, touched, and whether that took long.

    It has not the interpreter's lock meanwhile, and touches a page after the other: no other thread waits for it.
    """
    region, started_s = _new_region(num_bytes), time.thread_time()
    ctypes.memset(_address(region) + _first_byte(region), 0, num_bytes)
    return region, time.thread_time() - started_s > LEAST_S_PER_BYTE * num_bytes


def _first_byte(region: mmap.mmap) -> int:
    """Where the first huge page of a region begins."""
    return -_address(region) % _HUGE_PAGE_BYTES


def _address(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


REGIONS = MemoryRegions()
"""Those of this process."""
